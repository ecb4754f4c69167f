"""The training job of `dpflash train`, from its configuration to its report."""
