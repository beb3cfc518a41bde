"""What a new kind of device has to show before it is trusted: `python -m titan.bench suite=acceptance`."""
