// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The published rows.

use std::fmt;

use super::super::PublishedKernel;
use granule_types::{backing::Backing, phase::Phase, units::Bytes};

/// The workload of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Backing of the memory.
    pub backing: Backing,
    /// Size of the memory.
    pub memory: Bytes,
    /// Number of vCPUs.
    pub vcpus: u32,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}", self.backing, self.memory, self.vcpus)
    }
}

impl Workload {
    /// Returns the workload with less memory, at least one page, and the factor of the reduction.
    pub(super) fn divided(self, by: u64) -> (Self, f64) {
        let page = match self.backing {
            Backing::AnonymousHugetlb(Some(size)) => size.0,
            _ => 2 << 20,
        };
        let memory = (self.memory.0 / by / page).max(1) * page;
        let smaller = Self { memory: Bytes(memory), ..self };
        (smaller, as_f64(self.memory.0) / as_f64(memory))
    }
}

#[expect(clippy::cast_precision_loss, reason = "all numbers are below 2^53")]
pub(super) fn as_f64(number: u64) -> f64 {
    number as f64
}

/// One row of the published figures.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Number of the published change.
    pub change: u8,
    /// The workload.
    pub workload: Workload,
    /// The phase.
    pub phase: Phase,
    /// Published seconds before and after the change.
    pub seconds: (f64, f64),
    /// `true` if costs are fitted to the row.
    pub fitted: bool,
    /// The reason for a row that the simulation is known to miss.
    pub miss: Option<&'static str>,
}

const THP: Backing = Backing::AnonymousThp;
const HUGETLB: Backing = Backing::AnonymousHugetlb(Some(Bytes::gib(1)));

const fn row(
    change: u8,
    (backing, gib, vcpus): (Backing, u64, u32),
    phase: Phase,
    seconds: (f64, f64),
) -> Row {
    Row {
        change,
        workload: Workload { backing, memory: Bytes::gib(gib), vcpus },
        phase,
        seconds,
        fitted: false,
        miss: None,
    }
}

const fn fitted(row: Row) -> Row {
    Row { fitted: true, ..row }
}

const fn missed(row: Row, why: &'static str) -> Row {
    Row { miss: Some(why), ..row }
}

const NO_COALESCING: &str = "a reader is first on every block and maps the host's huge zero page, so \
    no block becomes private and none is coalesced, before or after the change; which blocks the \
    real machine coalesced is not known";

/// The published rows, in the order of publication.
pub const ROWS: [Row; 13] = [
    row(1, (Backing::Anonymous, 1, 80), Phase::Create, (104.63, 97.30)),
    row(1, (Backing::Anonymous, 1, 80), Phase::Update, (78.47, 77.18)),
    fitted(row(1, (THP, 20, 40), Phase::Create, (15.70, 7.36))),
    row(1, (THP, 20, 40), Phase::Update, (161.00, 135.03)),
    row(1, (THP, 20, 40), Phase::Rebuild, (170.49, 145.46)),
    fitted(row(1, (HUGETLB, 20, 40), Phase::Create, (104.55, 3.69))),
    fitted(row(1, (HUGETLB, 20, 40), Phase::Update, (160.67, 130.65))),
    row(1, (HUGETLB, 20, 40), Phase::Rebuild, (103.95, 2.96)),
    missed(row(2, (THP, 20, 20), Phase::Rebuild, (73.64, 57.75)), NO_COALESCING),
    missed(row(2, (THP, 20, 40), Phase::Rebuild, (145.4, 130.8)), NO_COALESCING),
    fitted(row(2, (HUGETLB, 1, 80), Phase::Rebuild, (0.166, 0.035))),
    row(2, (HUGETLB, 20, 20), Phase::Rebuild, (2.875, 0.282)),
    row(2, (HUGETLB, 20, 40), Phase::Rebuild, (2.965, 0.359)),
];

impl Row {
    /// Returns the kernels before and after the change.
    pub const fn kernels(&self) -> (PublishedKernel, PublishedKernel) {
        match self.change {
            1 => (PublishedKernel::Base, PublishedKernel::Handlers),
            _ => (PublishedKernel::Handlers, PublishedKernel::InstallFirst),
        }
    }
}
