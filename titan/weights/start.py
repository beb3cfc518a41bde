"""Initialise a run with weights of any format (`checkpoint.weights`)."""

from __future__ import annotations

from titan.checkpoint.coordinator import CoordinationError, Coordinator
from titan.checkpoint.state import TrainState
from titan.errors import ConfigError, RunError
from titan.weights.formats import open_weights
from titan.weights.load import load_weights


def load_initial_weights(state: TrainState, path: str, coordinator: Coordinator) -> None:
    """Load the weights at `path` and leave the optimizer unchanged; all ranks call it together.

    Raises:
        ConfigError: when the weights are of another model, or a file is broken.
    """
    parameters = {name: parameter.detach() for name, parameter in state.named_weights()}
    try:
        advance = coordinator.activity.record_progress
        coordinator.run_all(lambda: load_weights(parameters, open_weights(path), no_dist=True, advance=advance))
    except CoordinationError as error:
        raise (ConfigError if error.is_config_error else RunError)(str(error)) from error
    if state.tied_weights is not None:
        state.tied_weights.align(state.optimizer)
