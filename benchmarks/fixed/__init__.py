"""Where the time of a step goes that does not depend on the model: by part, in microseconds."""
