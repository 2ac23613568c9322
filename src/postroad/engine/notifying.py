"""The default transport: what carries out the kinds of this app that have no sender of their own."""

from collections.abc import Mapping
from typing import Any

from postroad.engine.config import BadSetting, Setting
from postroad.model.dispatches import Dispatch, Receipt
from postroad.model.errors import InvalidInput, RetryLater
from postroad.transports.argv import Argv

NOT_CONFIGURED = "no notify_template configured"


def of(settings: Mapping[str, Setting]) -> Argv | None:
    """The command that the settings name, if they name one.

    Raises:
        BadSetting: It is no command for `Argv`.
    """
    template, in_argv = settings["dispatch.notify_template"], settings["dispatch.payload_in_argv"]
    if template.value is None:
        return None
    try:
        return Argv(*template.value, payload_in_argv=in_argv.value)
    except InvalidInput as error:
        raise BadSetting(f"dispatch.notify_template ({template.source}): {error.detail}", field=template.name) from None


async def notify(dispatch: Dispatch[Any]) -> Receipt | str | None:
    """Carry out a dispatch by its app's notifier; to have none is a failed attempt, so that a cure helps what waits."""
    notifier = dispatch.post.notifier
    if notifier is None:
        raise RetryLater(NOT_CONFIGURED)
    return await notifier.send(dispatch)
