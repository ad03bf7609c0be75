"""sparsefusion: moving fewer bytes between ranks, and knowing what bytes cost."""
