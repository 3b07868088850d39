"""The trainer: data, loss, step, loop and command line around the models."""
