"""One hard memory budget for several models: their weights, and K/V memory that moves between them.

    budget   ├── weights A ──┼── weights B ──┼─── K/V of A ───┼── K/V of B ──┼─ free ─┤
                                               ◄─ target       ▲ asks for more

An account's K/V memory grows by asking and shrinks by giving back; nobody ever has more than was granted. Free memory
goes to whoever asks. After that, models give way whose unused prefixes are older than the asking model's oldest, so
that all models together evict like one cache. Up to its *least*, one whole context, an account is entitled to memory:
for that, others give way however recent their prefixes are, as soon as nobody uses them.

Every model's engine has its own thread. They meet only here, and nobody blocks: an account that cannot have memory now
is woken when there is some.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

NEVER = float("inf")


class AccountStatus(NamedTuple):
    """The bytes of one account."""

    name: str
    fixed: int
    kv: int
    least: int


class NoRoomError(Exception):
    """An account does not fit beside those that are open."""


class Account:
    """A model's memory. Its engine's thread asks for more, gives back, and reports its oldest unused prefix."""

    def __init__(self, ledger: MemoryLedger, name: str, fixed: int, least: int) -> None:
        self.name = name
        self.fixed = fixed
        """Bytes taken while the model is loaded: weights, and K/V memory that cannot shrink."""
        self.least = least
        """Bytes of K/V it is entitled to; 0: its K/V memory cannot grow or shrink."""
        self.kv = 0
        """Bytes of K/V granted now."""
        self.target = 0
        """Bytes of K/V to shrink to, if that is less."""
        self.missing = 0
        """Bytes asked for and not granted."""
        self.vacant = 0
        """Bytes of K/V that are empty."""
        self.unused = 0
        """Bytes of K/V that no running sequence needs, including empty ones."""
        self.oldest = NEVER
        """When its oldest unused prefix was last used."""
        self.wake: Callable[[], None] = lambda: None
        """Called from any thread when there is memory to give back, or to be had."""
        self.is_claimed = fixed == 0
        """Whether the fixed part is counted."""
        self.is_rigid = False
        """Whether its K/V can only grow."""
        self._ledger = ledger

    def ask(self, more: int, oldest: float, ahead: int = 0) -> bool:
        """Ask for `more` bytes, and `ahead` beyond them if they are free; `oldest`: when this model's oldest unused
        prefix was used. True: not all were granted yet, but others are about to give some back."""
        ledger = self._ledger
        with ledger.lock:
            entitled = self.kv < self.least
            others = [other for other in ledger.accounts if other is not self]
            may_take = entitled or not any(other.is_entitled for other in others)
            granted = min(more + ahead, ledger.unclaimed) if may_take else 0
            # If it was to give something back, it keeps that: those who wait for it must ask again.
            is_broken = granted > 0 and self.target < self.kv
            disappointed = [other for other in others if other.missing > 0] if is_broken else []
            self.kv += granted
            if granted:
                self.target = self.kv
            self.missing = max(0, more - granted)
            lacking = self.missing - ledger.on_its_way
            woken = ledger.reclaim(self, lacking, oldest, entitled=entitled) if lacking > 0 else []
            woken += disappointed
            soon = sum(min(other.kv - other.target, other.unused) for other in others)
            coming = self.missing > 0 and soon > 0
        _wake(woken)
        return coming

    def give_back(self, kv: int) -> None:
        """It has only `kv` bytes of K/V from now on."""
        with self._ledger.lock:
            woken = self._ledger.waiting if kv < self.kv else []
            self.kv = kv
            self.target = min(self.target, kv)
        _wake(woken)

    def keep_least(self) -> None:
        """It needs its memory: give back only what is beyond the least."""
        if self.target < self.kv:
            self._keep(self.least)

    def keep_used(self) -> None:
        """The rest is in use. It is given back later if another account is entitled to it; otherwise it stays."""
        self._keep(self.least if self.is_owed else self.kv)

    def keep_all(self) -> None:
        """Its memory cannot be given back."""
        self.is_rigid = True
        self._keep(self.kv)

    def _keep(self, kv: int) -> None:
        with self._ledger.lock:
            kept = max(self.target, min(self.kv, kv))
            woken = self._ledger.waiting if kept > self.target else []
            self.target = kept
        _wake([other for other in woken if other is not self])

    def close(self) -> None:
        """The model was unloaded, with all its memory."""
        with self._ledger.lock:
            self._ledger.accounts.remove(self)
            woken = self._ledger.waiting
        _wake(woken)

    def needs_no_more(self) -> None:
        self.missing = 0

    @property
    def is_owed(self) -> bool:
        """Whether others wait for memory they are entitled to."""
        with self._ledger.lock:
            return any(other.is_entitled for other in self._ledger.accounts if other is not self)

    @property
    def taken(self) -> int:
        return self.kv + (self.fixed if self.is_claimed else 0)

    @property
    def needed(self) -> int:
        return self.fixed + self.least

    @property
    def is_entitled(self) -> bool:
        """Whether it waits for memory it is entitled to."""
        return not self.is_claimed or (self.missing > 0 and self.kv < self.least)


class MemoryLedger:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.accounts: list[Account] = []
        self.lock = threading.Lock()

    # -- models come and go ------------------------------------------------------------------------------------

    def fits(self, needed: int) -> bool:
        """Whether an account that needs `needed` bytes can be opened."""
        with self.lock:
            return needed + sum(account.needed for account in self.accounts) <= self.budget

    def open(self, name: str, *, fixed: int, least: int) -> Account:
        account = Account(self, name, fixed, least)
        with self.lock:
            if account.needed + sum(other.needed for other in self.accounts) > self.budget:
                raise NoRoomError(f"{account.needed} bytes do not fit")
            self.accounts.append(account)
        return account

    def claim(self, account: Account) -> bool:
        """Count the fixed part, for which others give way. False: not yet."""
        with self.lock:
            if not account.is_claimed and self.unclaimed >= account.fixed:
                account.is_claimed = True
            if account.is_claimed:
                return True
            lacking = account.fixed - self.unclaimed - self.on_its_way
            woken = self.reclaim(account, lacking, NEVER, entitled=True)
        _wake(woken)
        return False

    # -- looking -----------------------------------------------------------------------------------------------

    def account_status(self) -> list[AccountStatus]:
        with self.lock:
            return [AccountStatus(account.name, account.fixed, account.kv, account.least) for account in self.accounts]

    @property
    def free(self) -> int:
        with self.lock:
            return self.unclaimed

    def check(self) -> None:
        """Raise AssertionError if more was granted than there is."""
        with self.lock:
            if self.unclaimed < 0 or any(account.target > account.kv for account in self.accounts):
                raise AssertionError(f"the budget of {self.budget} bytes is exceeded by {-self.unclaimed}")

    # -- inside, with the lock held ----------------------------------------------------------------------------

    @property
    def unclaimed(self) -> int:
        return self.budget - sum(account.taken for account in self.accounts)

    @property
    def on_its_way(self) -> int:
        """What accounts must give back and have not yet."""
        return sum(account.kv - account.target for account in self.accounts)

    @property
    def waiting(self) -> list[Account]:
        return [account for account in self.accounts if account.missing > 0]

    def reclaim(self, account: Account, lacking: int, oldest: float, *, entitled: bool) -> list[Account]:
        """Make others give `lacking` bytes back: what is empty, then what was used before `oldest`, the oldest first;
        if the account is `entitled`, also what they have beyond their own least. Returns those to wake."""
        lowered: dict[Account, None] = {}
        others = [other for other in self.accounts if other is not account and not other.is_rigid]
        others.sort(key=lambda other: other.oldest)
        for other in others:
            lacking -= _lower_target(other, lacking, other.vacant, lowered)
        for other in others:
            if entitled:
                lacking -= _lower_target(other, lacking, max(other.unused, other.kv - other.least), lowered)
            elif other.oldest < oldest:
                lacking -= _lower_target(other, lacking, other.unused, lowered)
        return list(lowered)


def _lower_target(account: Account, wanted: int, most: int, lowered: dict[Account, None]) -> int:
    """Lower an account's target by up to `wanted` bytes, `most` in all; returns by how many."""
    amount = min(wanted, most - (account.kv - account.target))
    if amount <= 0:
        return 0
    account.target -= amount
    lowered[account] = None
    return amount


def _wake(accounts: list[Account]) -> None:
    for account in accounts:
        account.wake()
