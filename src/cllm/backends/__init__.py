"""What runs the model. Every backend implements `cllm.backends.base.Backend`."""
