"""Former place of what `titan.run.directory` reads."""

from __future__ import annotations

from titan.run.directory import is_finished as is_finished
from titan.run.directory import is_locked as is_locked
from titan.run.directory import read_result as read_result
