"""Questions about large models: the defaults that models by name take, and the figures that people quote."""
