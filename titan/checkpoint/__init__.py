"""The checkpoint axis: save, verify, keep, copy and load the state of a run.

`manager` saves (with `save` and `save_planner`) and copies to a `remote` URL; `manifest` defines a complete checkpoint
and removes old ones. At the start of an attempt `select` chooses a checkpoint and `restore` verifies and loads it (with
`reader`, which runs no code from a file). All communication between ranks goes through the `coordinator`.
"""
