"""`TensorSource`s for the models of trainers. They yield one whole tensor at a time, under the checkpoint's names."""
