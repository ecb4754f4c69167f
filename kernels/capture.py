"""CUDA graphs: what must not be captured, because a replay would do it again."""

import torch


def refuse_capture(reason: str) -> None:
    """Raise RuntimeError while the current CUDA stream is capturing.

    Args:
        reason: what would be captured and what a replay would do, for the message.
    """
    # Without CUDA in the build the second would raise, and nothing captures before the first.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA stream is capturing a graph, and {reason}. Leave it out of the capture: call "
            "it outside of torch.cuda.graph, make_graphed_callables and the like"
        )
