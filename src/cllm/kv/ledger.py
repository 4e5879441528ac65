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
        return self._ledger.ask(self, more, oldest, ahead)

    def give_back(self, kv: int) -> None:
        """It has only `kv` bytes of K/V from now on."""
        self._ledger.give_back(self, kv)

    def keep_least(self) -> None:
        """It needs its memory: give back only what is beyond the least."""
        if self.target < self.kv:
            self._ledger.keep(self, self.least)

    def keep_used(self) -> None:
        """The rest is in use. It is given back later if another account is entitled to it; otherwise it stays."""
        self._ledger.keep_used(self)

    def keep_all(self) -> None:
        """Its memory cannot be given back."""
        self.is_rigid = True
        self._ledger.keep(self, self.kv)

    def close(self) -> None:
        """The model was unloaded, with all its memory."""
        self._ledger.close(self)

    def needs_no_more(self) -> None:
        self.missing = 0

    @property
    def is_owed(self) -> bool:
        """Whether others wait for memory they are entitled to."""
        return self._ledger.is_owed(self)

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
        self._accounts: list[Account] = []
        self._lock = threading.Lock()

    # -- models come and go ------------------------------------------------------------------------------------

    def fits(self, needed: int) -> bool:
        """Whether an account that needs `needed` bytes can be opened."""
        with self._lock:
            return needed + sum(account.needed for account in self._accounts) <= self.budget

    def open(self, name: str, *, fixed: int, least: int) -> Account:
        account = Account(self, name, fixed, least)
        with self._lock:
            if account.needed + sum(other.needed for other in self._accounts) > self.budget:
                raise NoRoomError(f"{account.needed} bytes do not fit")
            self._accounts.append(account)
        return account

    def claim(self, account: Account) -> bool:
        """Count the fixed part, for which others give way. False: not yet."""
        with self._lock:
            if not account.is_claimed and self._free >= account.fixed:
                account.is_claimed = True
            if account.is_claimed:
                return True
            lacking = account.fixed - self._free - self._on_its_way
            woken = self._reclaim(account, lacking, NEVER, entitled=True)
        _wake(woken)
        return False

    def close(self, account: Account) -> None:
        with self._lock:
            self._accounts.remove(account)
            woken = self._waiting
        _wake(woken)

    # -- K/V ---------------------------------------------------------------------------------------------------

    def ask(self, account: Account, more: int, oldest: float, ahead: int = 0) -> bool:
        with self._lock:
            entitled = account.kv < account.least
            others = [other for other in self._accounts if other is not account]
            may_take = entitled or not any(other.is_entitled for other in others)
            granted = min(more + ahead, self._free) if may_take else 0
            # If it was to give something back, it keeps that: those who wait for it must ask again.
            is_broken = granted > 0 and account.target < account.kv
            disappointed = [other for other in others if other.missing > 0] if is_broken else []
            account.kv += granted
            if granted:
                account.target = account.kv
            account.missing = max(0, more - granted)
            lacking = account.missing - self._on_its_way
            woken = self._reclaim(account, lacking, oldest, entitled=entitled) if lacking > 0 else []
            woken += disappointed
            soon = sum(min(other.kv - other.target, other.unused) for other in others)
            coming = account.missing > 0 and soon > 0
        _wake(woken)
        return coming

    def give_back(self, account: Account, kv: int) -> None:
        with self._lock:
            woken = self._waiting if kv < account.kv else []
            account.kv = kv
            account.target = min(account.target, kv)
        _wake(woken)

    def keep(self, account: Account, kv: int) -> None:
        with self._lock:
            kept = max(account.target, min(account.kv, kv))
            woken = self._waiting if kept > account.target else []
            account.target = kept
        _wake([other for other in woken if other is not account])

    def is_owed(self, account: Account) -> bool:
        with self._lock:
            return any(other.is_entitled for other in self._accounts if other is not account)

    def keep_used(self, account: Account) -> None:
        self.keep(account, account.least if self.is_owed(account) else account.kv)

    # -- looking -----------------------------------------------------------------------------------------------

    def account_status(self) -> list[AccountStatus]:
        with self._lock:
            return [AccountStatus(account.name, account.fixed, account.kv, account.least) for account in self._accounts]

    @property
    def free(self) -> int:
        with self._lock:
            return self._free

    def check(self) -> None:
        """Raise AssertionError if more was granted than there is."""
        with self._lock:
            if self._free < 0 or any(account.target > account.kv for account in self._accounts):
                raise AssertionError(f"the budget of {self.budget} bytes is exceeded by {-self._free}")

    # -- inside, with the lock held ----------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        return self.budget - sum(account.taken for account in self._accounts)

    @property
    def _on_its_way(self) -> int:
        """What accounts must give back and have not yet."""
        return sum(account.kv - account.target for account in self._accounts)

    @property
    def _waiting(self) -> list[Account]:
        return [account for account in self._accounts if account.missing > 0]

    def _reclaim(self, account: Account, lacking: int, oldest: float, *, entitled: bool) -> list[Account]:
        """Make others give `lacking` bytes back: what is empty, then what was used before `oldest`, the oldest first;
        if the account is `entitled`, also what they have beyond their own least. Returns those to wake."""
        lowered: dict[Account, None] = {}
        others = [other for other in self._accounts if other is not account and not other.is_rigid]
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
