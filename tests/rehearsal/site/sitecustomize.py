"""Python imports this at its start where PYTHONPATH names its folder: processes that a rehearsed command starts."""

import os

if os.environ.get("REHEARSAL_DEVICES"):
    from tests.rehearsal import imports

    imports.install_finder()
    imports.start_process()
