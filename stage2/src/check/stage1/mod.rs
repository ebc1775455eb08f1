// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the stage-1 tables of a running kernel: those of TTBR1, for the upper addresses.
//!
//! The models of tables and TLBs are those of stage 2. The rules differ in when an invalidation must
//! be complete, because a kernel may delay it: Linux leaves unmapped `vmalloc()` addresses in the TLBs
//! until it reuses them. A leaf that was removed is therefore checked when another one is made at its
//! addresses, and earlier only at the end of calls that promise more
//! ([`Role::ChangeKernel`](super::machine::Role::ChangeKernel)). A table must be invalidated before its
//! page is freed or written, because a walker may read it at any time.
//!
//! | file | events |
//! |---|---|
//! | `checker` | registers, TLB invalidations, barriers, calls, freed pages |
//! | `store` | an entry changes |
//! | `make` | an entry becomes valid; a root is selected |
//!
//! Not modelled: TTBR0 and non-global entries, which have an ASID; level -1 (FEAT_LPA2); tables that
//! are linked at two addresses (KASAN); the entry and exit code of KPTI, which switches roots.

mod checker;
mod entry;
mod make;
mod store;
mod tlbi;

pub(super) use self::{
    checker::{KernelViolation, NewTable, Stage1Checker},
    entry::{MemoryTypes, Stage1Entry},
    tlbi::decode,
};
