"""The library's gain, moments and weights beside one plain loop in float64, feature by feature."""
