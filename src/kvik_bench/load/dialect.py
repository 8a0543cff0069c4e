"""Which optional fields of the OpenAI API a server accepts, found out by asking it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Dialect:
    """The optional fields of a request."""

    limit: str = "max_tokens"  # or "max_completion_tokens": the name of the token limit
    ignore_eos: bool = True  # answers of the full length
    usage: bool = True  # token counts at the end of a stream
    running_usage: bool = True  # token counts with each chunk

    def fields(self, output_tokens: int) -> dict[str, object]:
        fields: dict[str, object] = {self.limit: output_tokens}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.usage:
            options = {"include_usage": True}
            if self.running_usage:
                options["continuous_usage_stats"] = True
            fields["stream_options"] = options
        return fields

    def names(self) -> tuple[str, ...]:
        """Of the fields that are sent."""
        pairs = (
            (self.limit, True),
            ("ignore_eos", self.ignore_eos),
            ("include_usage", self.usage),
            ("continuous_usage_stats", self.usage and self.running_usage),
        )
        return tuple(name for name, is_sent in pairs if is_sent)

    def after_refusal(self, message: str) -> Dialect | None:
        """What to try next, when a server refused a request with these words; None: nothing."""
        if "max_completion_tokens" in message and self.limit == "max_tokens":
            return replace(self, limit="max_completion_tokens")
        if "ignore_eos" in message and self.ignore_eos:
            return replace(self, ignore_eos=False)
        if "continuous_usage_stats" in message and self.usage and self.running_usage:
            return replace(self, running_usage=False)
        if ("stream_options" in message or "include_usage" in message) and self.usage:
            return replace(self, usage=False)
        # It did not say what it dislikes.
        plainer = Dialect(self.limit, ignore_eos=False, usage=self.usage, running_usage=False)
        if plainer != self:
            return plainer
        return replace(self, usage=False) if self.usage else None
