"""From layers to clipped sums: gates, planner, clipping factors, and how fast the device is."""
