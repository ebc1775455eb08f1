// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Keywords of the trace text format, for the parser and the writer.

use crate::{
    check::event::StoreKind,
    engine::{Access, FaultStatus},
    operations::Dsb,
};

pub(super) type Words<T> = [(&'static str, T)];

pub(super) const DSBS: &Words<Dsb> =
    &[("nshst", Dsb::NshSt), ("nsh", Dsb::Nsh), ("ishst", Dsb::IshSt), ("ish", Dsb::Ish)];
pub(super) const STORE_KINDS: &Words<StoreKind> =
    &[("plain", StoreKind::Plain), ("release", StoreKind::Release), ("swap", StoreKind::Swap)];
pub(super) const CACHING: &Words<bool> = &[("cached", false), ("uncached", true)];
pub(super) const LOCKS: &Words<bool> = &[("exclusive", true), ("shared", false)];
pub(super) const SWITCH: &Words<bool> = &[("on", true), ("off", false)];
pub(super) const ACCESSES: &Words<Access> =
    &[("read", Access::Read), ("write", Access::Write), ("fetch", Access::Fetch)];
pub(super) const STATUSES: &Words<FaultStatus> = &[
    ("translation", FaultStatus::Translation),
    ("access-flag", FaultStatus::AccessFlag),
    ("permission", FaultStatus::Permission),
];

/// Returns the word of a value.
pub(super) fn word<T: PartialEq>(words: &Words<T>, value: T) -> &'static str {
    let found = words.iter().find(|(_, other)| *other == value);
    found.map_or("?", |(word, _)| word)
}
