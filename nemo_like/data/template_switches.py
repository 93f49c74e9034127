"""Variables of a chat template that a user may set, such as ``enable_thinking``."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from nemo_like.errors import UserError

SWITCHES = "data.template_switches"
_MARKERS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_GIVEN = re.compile(
    r"messages|tools|documents|add_generation_prompt|continue_final_message|raise_exception"
    r"|strftime_now|\w+_tokens?"
)
"""Names that transformers gives to every template."""


def check_switches(template: str, switches: Mapping[str, Any], key: str) -> None:
    """Refuse a switch that the template never uses; the error names the nearest that it does.

    ``key`` is where the configuration has them.
    """
    known = switches_of(template) if switches else frozenset()
    for name in switches:
        if name in known:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5) or sorted(known)
        remedy = f"did you mean {' or '.join(near)}?" if near else "it has none, so leave it out."
        raise UserError(f"{key}.{name} is no switch of the model's chat template; {remedy}")


def those_known(template: str, switches: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``switches`` that the template uses."""
    known = switches_of(template) if switches else frozenset()
    return {name: value for name, value in switches.items() if name in known}


def switches_of(template: str) -> frozenset[str]:
    """Names that the template looks at and that neither it nor transformers sets.

    >>> switches_of("{% if think %}{% set x = 1 %}{% endif %}{{ x }}{{ messages }}{{ bos_token }}")
    frozenset({'think'})
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_MARKERS.sub("", template))
    except TemplateSyntaxError:
        return frozenset()  # rendering says why
    names = meta.find_undeclared_variables(parsed) - environment.globals.keys()
    # A name that is set in one branch and used in another counts as undeclared; one that the
    # template only sets where it is not given is looked at first.
    names -= _assigned(parsed) - _looked_for(parsed)
    return frozenset(name for name in names if not _GIVEN.fullmatch(name))


def _assigned(parsed: nodes.Template) -> set[str]:
    return {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}


def _looked_for(parsed: nodes.Template) -> set[str]:
    """Names that are tested for being given, or have a default."""
    tests = [one for one in parsed.find_all(nodes.Test) if one.name in ("defined", "undefined")]
    defaults = [one for one in parsed.find_all(nodes.Filter) if one.name in ("default", "d")]
    return {one.node.name for one in (*tests, *defaults) if isinstance(one.node, nodes.Name)}
