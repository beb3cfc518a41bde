"""The checkpoint axis: save, verify, keep, copy and load the state of a run.

`manager` saves (with `plans`, `staging` and `writer`), `manifest` defines a complete checkpoint, `retention` removes
old ones, `transfer` copies them to a `remote` URL. At the start of an attempt `select` chooses a checkpoint and
`restore` verifies and loads it (with `reader`, which runs no code from a file: `safe_pickle`). All communication
between ranks goes through the `coordinator`.
"""
