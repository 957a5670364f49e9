"""The operations that choose tokens, in torch: the argmax, draws, and what a grammar allows."""

from __future__ import annotations

from torch import Tensor

from .logits import (
    DrawLimits,
    argmax,
    draw,
    draw_uniform,
    keep_allowed,
    keep_top_k,
    keep_top_p,
    narrow_to_top_k,
    scale_of,
)


class Draws:
    """The part of Ops that chooses tokens."""

    def argmax_step(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Choose each row's argmax, write it as the next input token, and advance the position.

        Args:
            logits: fp32 [B, V], contiguous.
            ids: int64 [B]; is overwritten with the tokens.
            positions: int64 [B]; each is increased by 1.

        Returns:
            int64 [B]; see logits.argmax.
        """
        tokens = argmax(logits)
        ids.copy_(tokens.clamp(min=0))
        positions += 1
        return tokens

    def draw_limits(
        self,
        slots: Tensor,
        seeds: Tensor,
        generated: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        temperature: Tensor | None = None,
    ) -> DrawLimits:
        """Find what limits the next draw of some slots, from columns of the table of all slots; not what a host knows.

        Args:
            slots: int64 [n].
            seeds: int64 [slots], with the stride of top_k.
            generated: int64 [slots], with the stride of top_k: how many tokens each has.
            top_k: int64 [slots].
            top_p: fp32 [slots].
            temperature: fp32 [slots], with the stride of top_p; None: the logits have theirs.
        """
        uniform = draw_uniform(seeds[slots], generated[slots])
        scales = None if temperature is None else scale_of(temperature[slots])
        return DrawLimits(top_k[slots], top_p[slots], uniform, scales)

    def draw_tokens(self, logits: Tensor, rows: Tensor, limits: DrawLimits) -> Tensor:
        """Draw a token for some rows: top-k, then top-p, then by the uniform random number.

        Args:
            logits: fp32 [B, V].
            rows: int64 [n].
            limits: of these rows.

        Returns:
            int64 [n].
        """
        top_k, top_p, uniform, scales = limits[:4]
        logits = logits[rows] if scales is None else logits[rows] * scales[:, None]
        if limits.keeps_all:
            return draw(logits, uniform)
        if not limits.is_narrow:
            kept = keep_top_k(logits, top_k, limits.largest)
            return draw(keep_top_p(kept, top_p), uniform)
        values, ids = narrow_to_top_k(logits, top_k, limits.largest)
        return ids.gather(1, draw(keep_top_p(values, top_p), uniform)[:, None])[:, 0]

    def keep_allowed(self, logits: Tensor, rows: Tensor | None, bits: Tensor) -> Tensor:
        """Mask tokens that some rows' grammars do not allow, as keep_allowed says.

        Args:
            logits: fp32 [B, V]; may be overwritten with the result.
            rows: int64 [n]; None: all of them.
            bits: uint8 [n, at least V / 8].

        Returns:
            fp32 [B, V].
        """
        return keep_allowed(logits, rows, bits)

    def warm_up_sampling(self, vocab_size: int) -> None:
        """Compile what draw_tokens needs for logits of this many columns: torch needs nothing."""
