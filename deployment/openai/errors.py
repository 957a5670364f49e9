"""What a client is told when its request fails: OpenAI's form, with the HTTP status that its clients expect."""

from __future__ import annotations

from typing import Any

from handover.errors import SlipwayError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(SlipwayError):
    """A request that is not answered.

    Args:
        problem: what is wrong and where.
        hint: what is legal or what to do next.
        status: of HTTP.
        param: name of the field at fault; None: no single one.
        code: OpenAI's word for the case, such as ``model_not_found``; None: it has none.
        headers: of the answer, such as Retry-After.
    """

    def __init__(
        self,
        problem: str,
        hint: str = "",
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(problem, hint)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The answer's content."""
        message = f"{self.problem}: {self.hint}" if self.hint else self.problem
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}
