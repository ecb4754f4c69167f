"""Rules for PEFT: adapters in a ParameterDict, DoRA's magnitudes, prompts.

If an adapted layer keeps its adapters in a ParameterDict and uses them itself (IA3, LoRA on
embeddings, trainable tokens, VeRA), the layer and all modules below it are one layer of the
generic rule: vmap gives each sample its own adapters. Other adapters are separate layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..clipping.planner import EmbeddingShape
from .base import PrivateModule, of_units
from .embedding import inside, look_up, nan_outside
from .generic import PrivateLeaf


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module is a PEFT layer that owns a ParameterDict and all modules below."""
    if not type(module).__module__.startswith("peft.tuners."):
        return False
    return any(
        isinstance(child, nn.ParameterDict | nn.ParameterList)
        and any(p.requires_grad for p in child.parameters())
        for child in module.children()
    )


def makes_prompts(module: nn.Module) -> bool:
    """Return whether a module is a model to which PEFT adds virtual tokens."""
    return type(module).__module__ == "peft.peft_model" and hasattr(module, "prompt_encoder")


class PrivatePrompts(PrivateModule):
    """A model of prompt tuning or p-tuning that encodes the prompt once per sample.

    PEFT encodes one prompt for all samples, so the gradient would be a sum over samples.
    """

    def get_prompt(
        self, batch_size: int, task_ids: Tensor | None = None, max_cache_len: int | None = None
    ) -> Any:
        model: Any = self
        kind = model.active_peft_config.peft_type.value
        if kind not in ("PROMPT_TUNING", "P_TUNING") or not torch.is_grad_enabled():
            return super().get_prompt(batch_size, task_ids, max_cache_len)  # type: ignore[misc]
        units = model._dpflash.backward.forward.units
        if units is not None and not units.are_rows:
            self.refuse_documents()  # All documents of a row would share one prompt.
        name = model.active_adapter
        encoder = model.prompt_encoder[name]
        tokens = model.prompt_tokens[name].to(encoder.embedding.weight.device)
        return encoder(tokens.unsqueeze(0).expand(batch_size, -1))


class PrivateDora(PrivateModule):
    """DoRA on a linear layer: y = (s - 1) W x + s a B A x with s = m / ||W + a B A||.

    m is the magnitude [O] and a the scaling. The norms [O] count as constants in the gradient.
    Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", section 4.3.
    """

    takes_documents = True
    fan_in_fan_out: bool

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(
                x,
                lora_A=lora_A,
                lora_B=lora_B,
                scaling=scaling,
                base_layer=base_layer,
                base_result=base_result,
                adapter_name=adapter_name,
            )
        from peft.utils.integrations import dequantize_module_weight

        self.is_private_call()
        context = self._dpflash
        rows = context.check_batch(x)
        magnitude = self.private_handles(context.samples_of(rows)).values("weight")
        if magnitude is None:
            magnitude = self._parameters["weight"].detach().unsqueeze(0)  # type: ignore[union-attr]
        elif context.units is not None:
            magnitude = of_units(magnitude, context.units)
        with torch.no_grad():
            weight = dequantize_module_weight(base_layer).to(x.dtype)
            weight = weight.t() if self.fan_in_fan_out else weight
            adapted = weight + scaling * (lora_B.weight @ lora_A.weight).to(x.dtype)
            norms = torch.linalg.norm(adapted, dim=1).to(x.dtype)
        scale = magnitude / norms
        if context.units is None:
            scale = scale.unflatten(0, (-1, *[1] * (rows.ndim - 2)))
        if base_result is None:
            base_result = F.linear(x, weight)
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        base, low_rank = (
            y.reshape(*rows.shape[:-1], y.shape[-1]) for y in (base_result, lora_B(lora_A(x)))
        )
        return context.as_given((scale - 1) * base + scale * low_rank * scaling, x)


class PrivateTrainableTokens(PrivateLeaf):
    """A frozen table with some trained rows, which are looked up in a separate table.

    PEFT writes trained rows into a copy of the whole table; each sample would need such a copy.
    """

    base_layer: nn.Module
    active_adapters: list[str]
    token_indices: dict[str, list[int]]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        base = layer.get_base_layer()
        is_table = isinstance(base, nn.Embedding) and not base.weight.requires_grad and x.ndim > 1
        if not is_table or layer.disable_adapters or layer.merged or not self.is_private_call():
            return super().forward(x, *args, **kwargs)
        layer._check_overlapping_tokens(self.active_adapters)
        indices = self._dpflash.check_batch(x)
        flat, outside = inside(indices.flatten(1), base.num_embeddings)
        result = nan_outside(base(flat, *args, **kwargs), outside, self._dpflash.backward.forward)
        for adapter in self.active_adapters:
            result = self._replace(result, flat, adapter, base, layer._get_embed_scale())
        if self._dpflash.units is not None:
            return result.reshape(*x.shape, result.shape[-1])
        return self._dpflash.as_given(result.unflatten(1, indices.shape[1:]), x)

    def _replace(
        self, rows: Tensor, indices: Tensor, adapter: str, base: nn.Embedding, scale: Tensor | None
    ) -> Tensor:
        """Replace the rows [B, T, E] whose indices [B, T] an adapter trains."""
        name = f"trainable_tokens_delta.{adapter}"
        delta = self.own_parameters()[name]
        own = torch.tensor(self.token_indices[adapter], device=indices.device)
        places = own.new_full((base.num_embeddings,), -1)
        places[own] = torch.arange(len(own), device=own.device)
        place = places[indices]
        samples = self._dpflash.samples_of(indices)
        handles = self.private_handles(samples)
        handle = handles[name]
        tokens = indices.numel() // max(1, samples)
        shape = EmbeddingShape(samples, tokens, delta.shape[1], delta.shape[0], delta.dtype)
        new = look_up(place.clamp(min=0), delta.detach(), handle, handles.slot(name, shape))
        if base.padding_idx is not None:
            new = torch.where((indices == base.padding_idx).unsqueeze(-1), new.detach(), new)
        new = new.to(base.weight.dtype)
        new = new if scale is None else new * scale.to(new.dtype)
        return torch.where((place >= 0).unsqueeze(-1), new.to(rows.dtype), rows)


def check_adapter(name: str, module: nn.Module) -> None:
    """Refuse adapters without a rule: DoRA's magnitudes of convolutions, LoRA on parameters.

    Raises:
        ValueError: the module is such an adapter; the message names it.
    """
    kind = type(module)
    if kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ == "ParamWrapper":
        raise ValueError(
            f"module '{name}' adds LoRA to a parameter of another module (target_parameters), "
            "whose layers it uses outside of their calls. Adapt layers by target_modules instead, "
            "or train the experts' parameters themselves"
        )
    if kind.__module__ == "peft.tuners.lora.dora" and kind.__name__ != "DoraLinearLayer":
        raise ValueError(
            f"module '{name}' is {kind.__name__}: DoRA has a rule only for linear layers and "
            "embeddings. Pass use_dora=False, or leave these layers out of target_modules"
        )
