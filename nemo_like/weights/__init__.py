"""What a model's weights are called and how they are bundled, for policy, engines and refit."""
