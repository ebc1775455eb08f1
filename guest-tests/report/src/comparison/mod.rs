// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The comparison of two sides, each a list of samples.
//!
//! ```text
//! samples ─ group ─ configuration ─┬─ growth ─┐
//!                                  └──────────┴─ table ─ notes ─ build: Comparison::of
//! ```
//!
//! Samples form one group for each configuration (engine, mode, backing, size, vCPUs, options);
//! seeds and iterations are the runs of a group. Both sides need the same provenance. The runs of
//! each step are then tested against each other and judged over the whole table. Counts explain a
//! time; they are judged only as [`Options::metric`].

mod build;
mod configuration;
mod error;
mod group;
mod growth;
mod notes;
mod options;
mod table;

pub use self::{
    configuration::{Configuration, PhaseChange, Runs},
    error::CompareError,
    group::{Group, groups},
    growth::{Fit, Growth, Sweep, SweepParameter, sweeps},
    options::{Options, command_line},
    table::{Comparison, GeometricMean, SCHEMA, TIME},
};
