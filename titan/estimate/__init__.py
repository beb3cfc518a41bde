"""What a run will take, from its schemas alone. Free of torch."""
