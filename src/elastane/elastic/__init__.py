"""The worker side of elasticity: regrouping, moving state and keeping it."""
