"""Pipeline parallelism: schedules, the stage plan and the runtime."""
