"""What follows from the traced operations of a step: memory over time, the allocator, and time. Free of torch."""
