"""Whom a trust policy lets in that it should not, where the policy is the platform's own. Pure.

What is not understood is a gap: a condition counts only where it names values by ``StringEquals``.
"""

from __future__ import annotations

from typing import Any, Final

from strongroom_security.roles.policies import listed, principal_of, statements_of

__all__ = ["gap_of_trust"]

Json = Any

_EXACT: Final = ("stringequals", "stringequalsignorecase", "foranyvalue:stringequals")
"""Operators by which a claim has to be there and to be one of the values. Those that end in ``IfExists``,
that negate, or that hold for all of no values let a token through which has no such claim."""


def gap_of_trust(value: Json, *, account: str | None) -> tuple[str, str] | None:
    """What is wrong with a trust policy, and what to do; None: nothing.

    Args:
        account: the role's; None: it is not known, and no account is another one.
    """
    for statement in statements_of(value):
        if statement.get("Effect") != "Allow":
            continue
        if "NotPrincipal" in statement or "NotAction" in statement:
            return "it says who may not take it up, and lets in all others", "name who may"
        principal = principal_of(statement.get("Principal"))
        condition = statement.get("Condition") or {}
        for kind, gap in (("AWS", _gap_of_identities), ("Federated", _gap_of_tokens)):
            for named in principal.get(kind, []):
                found = gap(str(named), condition, account)
                if found is not None:
                    return found
    return None


def _gap_of_identities(named: str, condition: Json, account: str | None) -> tuple[str, str] | None:
    if "*" in named:
        return "anybody may take it up", "name who may; its policies bind whoever has it"
    parts = named.split(":")
    whose = parts[4] if len(parts) > 4 else named
    if not (whose.isascii() and whose.isdigit()):
        return f"{named} may take it up, who is gone or no identity of IAM", "name who may by their ARN"
    if account is not None and whose != account:
        return (
            f"the account {whose} may take it up, which is another one",
            "name roles of this account; who has which rights there, nobody here can tell",
        )
    is_whole = named == whose or parts[-1] == "root"
    if is_whole and not _demands_second_factor(condition) and not _is_bound(condition, "aws:principalarn"):
        return (
            f"the whole account {whose} may take it up",
            "name the roles that may: everyone there who may sts:AssumeRole is let in",
        )
    return None


def _gap_of_tokens(named: str, condition: Json, _: str | None) -> tuple[str, str] | None:
    if named == "*":
        return "anybody may take it up", "name who may; its policies bind whoever has it"
    # A provider of OIDC has its own keys, all of SAML have the same, and some AWS knows by name.
    issuer = "saml" if ":saml-provider/" in named else named.partition(":oidc-provider/")[2] or named
    if not _is_bound(condition, f"{issuer.lower()}:sub"):
        return "any token of its provider takes it up", _BIND
    if not _is_bound(condition, f"{issuer.lower()}:aud"):
        return "a token of its provider for any audience takes it up", _BIND
    return None


_BIND: Final = "bind it to one subject and one audience by StringEquals, whole and without wildcards"


def _is_bound(condition: Json, name: str) -> bool:
    """Whether a key has to be there, and one of the values that are named, of which none is a pattern."""
    for operator, keys in condition.items():
        is_exact = operator.lower() in _EXACT
        is_like = operator.lower() in ("stringlike", "arnequals", "arnlike")
        for key, values in keys.items():
            texts = [str(each) for each in listed(values)]
            is_whole = not any("*" in text or "?" in text for text in texts)
            if key.lower() == name and texts and (is_exact or (is_like and is_whole)):
                return True
    return False


def _demands_second_factor(condition: Json) -> bool:
    found = (condition.get("Bool") or {}).get("aws:MultiFactorAuthPresent")
    return [str(each).lower() for each in listed(found)] == ["true"]
