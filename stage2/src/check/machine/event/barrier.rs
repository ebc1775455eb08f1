// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Barriers: the accesses that they order, the observers for which they do, and their names.

use crate::operations::Dsb;

/// The accesses that a barrier orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderedAccesses {
    /// Loads and stores.
    All,
    /// Stores.
    Stores,
    /// Loads, before loads and stores.
    Loads,
    /// Loads and stores of memory without the XS attribute (FEAT_XS): a `DSB nXS`.
    NonXs,
}

/// The observers for which a barrier orders accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Domain {
    /// This CPU.
    NonShareable,
    /// CPUs of the Inner Shareable domain.
    InnerShareable,
    /// CPUs and devices of the Outer Shareable domain.
    OuterShareable,
    /// The full system.
    FullSystem,
}

const NAMES: [(&str, OrderedAccesses, Domain); 16] = [
    ("sy", OrderedAccesses::All, Domain::FullSystem),
    ("st", OrderedAccesses::Stores, Domain::FullSystem),
    ("ld", OrderedAccesses::Loads, Domain::FullSystem),
    ("ish", OrderedAccesses::All, Domain::InnerShareable),
    ("ishst", OrderedAccesses::Stores, Domain::InnerShareable),
    ("ishld", OrderedAccesses::Loads, Domain::InnerShareable),
    ("nsh", OrderedAccesses::All, Domain::NonShareable),
    ("nshst", OrderedAccesses::Stores, Domain::NonShareable),
    ("nshld", OrderedAccesses::Loads, Domain::NonShareable),
    ("osh", OrderedAccesses::All, Domain::OuterShareable),
    ("oshst", OrderedAccesses::Stores, Domain::OuterShareable),
    ("oshld", OrderedAccesses::Loads, Domain::OuterShareable),
    ("synxs", OrderedAccesses::NonXs, Domain::FullSystem),
    ("ishnxs", OrderedAccesses::NonXs, Domain::InnerShareable),
    ("nshnxs", OrderedAccesses::NonXs, Domain::NonShareable),
    ("oshnxs", OrderedAccesses::NonXs, Domain::OuterShareable),
];

/// Returns the barrier with a name in lower case.
pub(super) fn by_name(name: &str) -> Option<(OrderedAccesses, Domain)> {
    let row = NAMES.iter().find(|row| row.0 == name);
    row.map(|(_, accesses, domain)| (*accesses, *domain))
}

/// Returns the name of a barrier.
pub(super) fn name(accesses: OrderedAccesses, domain: Domain) -> &'static str {
    let row = NAMES.iter().find(|row| row.1 == accesses && row.2 == domain);
    row.map_or("sy", |row| row.0)
}

/// Returns whether a barrier orders earlier stores to tables before later ones, for all walkers.
pub(in crate::check::machine) fn orders_stores(accesses: OrderedAccesses, domain: Domain) -> bool {
    accesses != OrderedAccesses::Loads && domain != Domain::NonShareable
}

/// Returns the model's barrier that orders the same accesses of table walkers, if any.
pub(in crate::check::machine) const fn dsb(
    accesses: OrderedAccesses,
    domain: Domain,
) -> Option<Dsb> {
    Some(match (accesses, domain) {
        (OrderedAccesses::All | OrderedAccesses::NonXs, Domain::NonShareable) => Dsb::Nsh,
        (OrderedAccesses::All | OrderedAccesses::NonXs, _) => Dsb::Ish,
        (OrderedAccesses::Stores, Domain::NonShareable) => Dsb::NshSt,
        (OrderedAccesses::Stores, _) => Dsb::IshSt,
        (OrderedAccesses::Loads, _) => return None,
    })
}
