"""The cluster axis: the machines a run is on, what their devices are and what they can do."""
