"""Leadership of the reconciler: a lease row whose epoch guards every apply.

An advisory lock would survive SIGSTOP of its holder; a lease runs out, by the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_service.db.engine import transaction

_ACQUIRE = text("""
    insert into leases (name, holder, epoch, expires_at)
    values ('reconcile', :holder, 1, clock_timestamp() + make_interval(secs => :seconds))
    on conflict (name) do update
    set holder = excluded.holder, expires_at = excluded.expires_at,
        epoch = leases.epoch + case when leases.holder = excluded.holder then 0 else 1 end
    where leases.holder = excluded.holder or leases.expires_at < clock_timestamp()
    returning epoch
""")
# The shared lock keeps a successor from taking over while a guarded transaction is open.
_GUARD = text("""
    select 1 from leases
    where name = 'reconcile' and holder = :holder and epoch = :epoch and expires_at > clock_timestamp() for share
""")
_RELEASE = text("""
    update leases set expires_at = clock_timestamp() - interval '1 second'
    where name = 'reconcile' and holder = :holder and epoch = :epoch
""")


class StaleLeaderError(Exception):
    """Another reconciler leads, or the lease ran out: what was decided is dropped."""


@dataclass(frozen=True, slots=True)
class Leadership:
    holder: str
    epoch: int


async def acquire(engine: AsyncEngine, holder: str, seconds: float) -> Leadership | None:
    """Takes or renews the lease; None while another holder's runs. `holder` is unique to one process's life."""
    async with transaction(engine) as session:
        epoch = (await session.execute(_ACQUIRE, {"holder": holder, "seconds": seconds})).scalar_one_or_none()
    return None if epoch is None else Leadership(holder, epoch)


async def release(engine: AsyncEngine, leadership: Leadership) -> None:
    """Lets a successor begin at once."""
    async with transaction(engine) as session:
        await session.execute(_RELEASE, {"holder": leadership.holder, "epoch": leadership.epoch})


async def guard(session: AsyncSession, leadership: Leadership) -> None:
    """First statement of every apply. Raises `StaleLeaderError`."""
    arguments = {"holder": leadership.holder, "epoch": leadership.epoch}
    if (await session.execute(_GUARD, arguments)).one_or_none() is None:
        raise StaleLeaderError(f"epoch {leadership.epoch} is over")
