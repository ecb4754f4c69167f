"""`dpflash train`: a training job from its configuration to its report."""
