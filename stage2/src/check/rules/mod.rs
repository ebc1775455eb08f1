// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The checks of the rules, by the event at which a violation shows.
//!
//! Each file adds methods to [`Checker`](super::Checker), one for each kind of event, which update
//! the models and call `Checker::report`:
//!
//! | file | events |
//! |---|---|
//! | `store` | an entry changes from one value to another |
//! | `make` | an entry becomes valid: a leaf or a table becomes reachable |
//! | `operation` | the lock, notes of the engine, the end of an operation or walk; tables are allocated and freed; TLB invalidations, CMOs, switches of the VMID |
//! | `host` | memory, dirty logging, the resumption of a vCPU |

mod host;
mod make;
mod operation;
mod store;
