"""How AWS decides on a request, as far as the policies here need it: for what no local server enforces.

It follows "Policy evaluation logic" of the IAM guide, for one account: an explicit deny anywhere wins; then
the identity's policies or a key's have to allow, and a session policy too, where there is one.

Anything that a document holds and that is not understood here is an error, and never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

__all__ = ["Request", "allows", "trusts"]

Policy = Mapping[str, Any]

_VARIABLE = re.compile(r"\$\{([^}]+)\}")
_MEMBERS = {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        action: as ``s3:PutObject``.
        resource: its ARN.
        principal: the ARN of the role that asks.
        context: condition keys, in lower case, and their values; those that are not there are absent. What
            a request usually has is added: TLS and the principal's ARN.
        tags: of the session.
    """

    action: str
    resource: str
    principal: str
    context: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def values(self, key: str) -> list[str] | None:
        """A condition key's values; None: it is absent."""
        known: dict[str, str | Sequence[str]] = {
            "aws:securetransport": "true",
            "aws:principalarn": self.principal,
            **{f"aws:principaltag/{name.lower()}": value for name, value in self.tags.items()},
            **{key.lower(): value for key, value in self.context.items()},
        }
        found = known.get(key.lower())
        if found is None:
            return None
        return [found] if isinstance(found, str) else list(found)


def allows(
    request: Request,
    *,
    identity: Sequence[Policy],
    resource: Policy | None = None,
    session: Policy | None = None,
    resource_has_to_allow: bool = False,
) -> bool:
    """Whether a request is allowed.

    Args:
        identity: the role's policies.
        resource: the bucket's or the key's.
        session: narrows the session.
        resource_has_to_allow: as a key's policy has to, where it does not leave it to IAM.
    """
    everything = [*identity, *([resource] if resource else []), *([session] if session else [])]
    if any(_says(policy, "Deny", request, is_resources=policy is resource) for policy in everything):
        return False
    if session is not None and not _says(session, "Allow", request):
        return False
    if resource_has_to_allow:
        # A key's policy that names a role is enough without the role's own, and the roles here have both.
        return resource is not None and _says(resource, "Allow", request, is_resources=True)
    return any(_says(policy, "Allow", request) for policy in identity)


def trusts(trust: Policy, request: Request) -> bool:
    """Whether a role's trust policy lets it be taken up; with tags, where the request has any."""
    tags = sorted(key.rpartition("/")[2] for key in request.context if key.startswith("aws:RequestTag/"))
    context = {**request.context, **({"aws:TagKeys": tags} if tags else {})}
    actions = (request.action, *(["sts:TagSession"] if tags else []))
    return all(
        _says(trust, "Allow", replace(request, action=action, context=context), is_resources=True)
        for action in actions
    )


def _says(policy: Policy, effect: str, request: Request, *, is_resources: bool = False) -> bool:
    assert policy["Version"] == "2012-10-17", policy
    return any(
        statement["Effect"] == effect and _applies(statement, request, is_resources)
        for statement in policy["Statement"]
    )


def _applies(statement: Policy, request: Request, is_resources: bool) -> bool:
    assert set(statement) <= _MEMBERS, statement
    assert is_resources == ("Principal" in statement), statement
    if is_resources and not _is_meant(statement["Principal"], request.principal):
        return False
    if not any(_like(action.lower(), request.action.lower()) for action in _listed(statement["Action"])):
        return False
    # Who trusts is the role itself.
    resources = [_filled(each, request) for each in _listed(statement.get("Resource", request.resource))]
    if not any(each is not None and _like(each, request.resource) for each in resources):
        return False
    return all(
        _holds(operator, key, _listed(wanted), request)
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    )


def _is_meant(principal: Any, caller: str) -> bool:
    if principal == "*":
        return True
    ((kind, named),) = principal.items()
    assert kind in ("AWS", "Federated"), principal
    account = f"{caller.rpartition(':')[0]}:root"
    return any(each in ("*", caller, account) for each in _listed(named))


def _holds(operator: str, key: str, wanted: list[str], request: Request) -> bool:
    found = request.values(key)
    if operator == "Null":
        (said,) = wanted
        return (found is None) == (said == "true")
    expected = [each for each in (_filled(text, request) for text in wanted) if each is not None]
    if operator == "ForAllValues:StringEquals":
        return all(each in expected for each in found or [])
    if operator in ("StringNotEquals", "ArnNotEquals"):
        # A key that is absent is not equal.
        return found is None or not any(each in expected for each in found)
    if found is None:
        return False
    assert len(found) == 1, (key, found)
    if operator in ("StringEquals", "Bool", "ArnEquals"):
        return found[0] in expected
    if operator == "NumericLessThan":
        return any(float(found[0]) < float(each) for each in expected)
    if operator == "DateLessThan":
        return any(datetime.fromisoformat(found[0]) < datetime.fromisoformat(each) for each in expected)
    if operator == "StringLike":
        return any(_like(each, found[0]) for each in expected)
    raise AssertionError(f"this evaluator does not know the operator {operator}")


def _filled(text: str, request: Request) -> str | None:
    """A text with its policy variables; None: one is absent, and nothing is like it."""
    names = _VARIABLE.findall(text)
    for name in names:
        values = request.values(name)
        if values is None:
            return None
        text = text.replace(f"${{{name}}}", values[0])
    return text


def _like(pattern: str, value: str) -> bool:
    parts = [".*" if each == "*" else "." if each == "?" else re.escape(each) for each in pattern]
    return re.fullmatch("".join(parts), value, re.DOTALL) is not None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
