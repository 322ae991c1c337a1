"""The page on optimizers, made of the committed results."""
