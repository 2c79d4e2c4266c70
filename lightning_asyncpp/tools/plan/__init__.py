"""``asyncpp plan``: memory and speed of a recipe on a kind of device, without training."""
