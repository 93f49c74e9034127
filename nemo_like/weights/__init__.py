"""What a model's weights are called, and how they are bundled: shared by policy, engines and refit."""
