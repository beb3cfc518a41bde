"""SimpleFSDP: parameters sharded by a parametrisation that the compiler sees as part of the model's graph."""
