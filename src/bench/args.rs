// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `granule bench`.

use std::{collections::BTreeMap, error::Error, num::NonZeroU32, path::PathBuf};

use granule_pgtable_test::config::{NothingLoggedError, PhaseSelection};
use granule_types::{
    backing::Backing,
    cpu_list::CpuList,
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress, parse_nonzero_size},
};

use super::values::{
    Engine, EventsOption, GuestMapOption, SweepValue, SweepValues, name_unless_default,
    parse_address, parse_count,
};
use crate::values::DirtyLogOption;

/// Options of `granule bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "Exit code: 0 done, 1 the test failed (a vCPU, a time limit, or a check), 2 the \
                  test cannot run as configured."
)]
pub struct Args {
    #[command(flatten)]
    pub(super) workload: WorkloadArgs,
    #[command(flatten)]
    pub(super) guest: GuestArgs,
    #[command(flatten)]
    pub(super) host: HostArgs,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

/// Options of the workload.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Backing of the memory under test
    #[arg(
        short = 's',
        long,
        value_name = "BACKING",
        default_value = "anonymous",
        help = format!("Backing of the memory under test: {}", Backing::all_names())
    )]
    pub(super) backing: Backing,
    /// Size of the memory under test, with K, M or G [default: 1G]
    #[arg(short = 'b', long = "size", alias = "memory", value_name = "SIZE",
          value_parser = parse_nonzero_size)]
    pub(super) memory: Option<Bytes>,
    /// Number of vCPUs [default: 1]
    #[arg(short = 'v', long, value_name = "VCPUS", value_parser = parse_count)]
    pub(super) vcpus: Option<NonZeroU32>,
    /// Number of iterations, each from untouched memory
    #[arg(short = 'i', long, value_name = "N", default_value = "1", value_parser = parse_count)]
    pub(super) iterations: NonZeroU32,
    /// Run once for each value of vcpus=1,2,4 or size=64M,256M, in place of -v or -b; two sweeps
    /// make a matrix
    #[arg(long, value_name = "WHAT=VALUES", value_parser = SweepValues::parse)]
    pub(super) sweep: Vec<SweepValues>,
    /// Phases to run, separated by commas; each adds the phases that it depends on. rebuild is the
    /// phase that kvm_page_table_test prints as KVM_ADJUST_MAPPINGS
    #[arg(long, value_name = "PHASES", default_value_t = PhaseSelection::all())]
    pub(super) phases: PhaseSelection,
    /// Omit create: start dirty logging with untouched memory, so that update maps page by page
    #[arg(long, conflicts_with = "migrate")]
    pub(super) log_untouched: bool,
    /// Run a migration instead of the phases: the vCPUs write random pages, the host collects the
    /// dirty bitmap in this many rounds and copies its pages, and source and destination are
    /// compared
    #[arg(
        long,
        value_name = "ROUNDS",
        conflicts_with = "phases",
        value_parser = clap::value_parser!(u32).range(1..=10_000)
    )]
    pub(super) migrate: Option<u32>,
    /// Length of a round of --migrate in milliseconds
    #[arg(
        long,
        value_name = "MS",
        default_value = "10",
        requires = "migrate",
        value_parser = clap::value_parser!(u32).range(1..=60_000)
    )]
    pub(super) round_ms: u32,
    /// Seed of the schedule: determines the start delay of each vCPU; 0 selects no delays
    #[arg(long, value_name = "SEED", default_value = "0")]
    pub(super) seed: u64,
    /// Time limit of the vCPUs in one phase, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = parse_count)]
    pub(super) deadline: NonZeroU32,
}

/// Options of the guest.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Guest")]
pub struct GuestArgs {
    /// Guest mode, by name (P48V48_4K) or by its number in Linux 6.1 (2), which other kernels
    /// assign to other modes [default: the widest of the host]
    #[arg(short = 'm', long, value_name = "MODE")]
    pub(super) mode: Option<GuestMode>,
    /// Guest-physical address of the memory under test [default: the top of the mode's addresses]
    #[arg(short = 'p', long, value_name = "OFFSET", value_parser = parse_address)]
    pub(super) phys_offset: Option<GuestAddress>,
    /// Width of guest-physical addresses [default: the smallest that fits]
    #[arg(long, value_name = "BITS")]
    pub(super) ipa_bits: Option<u8>,
    /// Mapping of the memory under test by the guest's stage-1 tables
    #[arg(long, value_enum, default_value_t)]
    pub(super) guest_map: GuestMapOption,
}

/// Options of the host and of the engine.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Host")]
pub struct HostArgs {
    /// Engine that runs the guest
    #[arg(long, value_enum, default_value_t)]
    pub(super) engine: Engine,
    /// Populate the memory in the host first, so that no phase contains its faults and zeroing
    #[arg(long)]
    pub(super) prefault: bool,
    /// Populate the memory in the host and in stage 2 first, so that create takes no faults
    /// (KVM_PRE_FAULT_MEMORY); implies --prefault
    #[arg(long)]
    pub(super) pre_fault: bool,
    /// Continue if the host provides other pages than configured; the results name them
    #[arg(long)]
    pub(super) accept_fallback: bool,
    /// Pin the vCPUs to these CPUs (0-3,8), in turn if there are fewer than vCPUs
    #[arg(long, value_name = "CPULIST")]
    pub(super) pin: Option<CpuList>,
    /// Mode of dirty logging
    #[arg(long, value_enum, default_value_t)]
    pub(super) dirty_log: DirtyLogOption,
    /// Split blocks eagerly when dirty logging starts, in chunks of SIZE (a block size of stage 2)
    #[arg(long, value_name = "SIZE")]
    pub(super) eager_split: Option<Bytes>,
    /// Enable this capability of the VM, by its number, on a host kernel whose patches define it
    #[arg(long, value_name = "NUMBER")]
    pub(super) vm_capability: Vec<u32>,
    /// Policy of the fault path with --engine software: linux-5.10, linux-5.10+series, linux-6.1,
    /// linux-6.12, linux-6.12+wait, linux-6.12+series or granule [default: granule]
    #[arg(long, value_name = "PRESET")]
    pub(super) policy: Option<String>,
}

/// Options of the output.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Write one JSON object for each phase to this file; - is standard output
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Kernel events to count, which costs a little time
    #[arg(long, value_enum, default_value_t)]
    pub(super) events: EventsOption,
}

/// Error returned for an option that conflicts with a sweep.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} conflicts with --sweep {1}=…; omit one of them")]
pub struct SweepConflict(pub(super) &'static str, pub(super) &'static str);

impl HostArgs {
    /// Returns whether the host populates the memory before the guest accesses it.
    pub(super) const fn populates_host_memory(&self) -> bool {
        self.prefault || self.pre_fault
    }
}

impl Args {
    /// Checks the options of all runs, so that errors are reported before the first one.
    pub(super) fn check(&self) -> Result<(), Box<dyn Error>> {
        SweepValues::check_unique(&self.workload.sweep)?;
        self.check_sweeps()?;
        self.selected_phases()?;
        if self.host.engine == Engine::Software {
            for point in &self.sweep_points() {
                point.software_config()?.check()?;
            }
        }
        Ok(())
    }

    /// Returns the arguments of each run: one for each combination of swept values.
    pub(super) fn sweep_points(&self) -> Vec<Self> {
        let mut points = vec![self.clone()];
        for sweep in &self.workload.sweep {
            let at = |point: &Self, value: SweepValue| {
                let mut point = point.clone();
                match value {
                    SweepValue::Vcpus(vcpus) => point.workload.vcpus = Some(vcpus),
                    SweepValue::Memory(memory) => point.workload.memory = Some(memory),
                }
                point
            };
            points = points
                .iter()
                .flat_map(|point| sweep.0.iter().map(move |&value| at(point, value)))
                .collect();
        }
        points
    }

    /// Checks that no sweep conflicts with an option.
    pub(super) fn check_sweeps(&self) -> Result<(), SweepConflict> {
        let workload = &self.workload;
        let conflict = |sweep: &SweepValues| match sweep.0[0] {
            SweepValue::Vcpus(_) => workload.vcpus.map(|_| SweepConflict("-v", "vcpus")),
            SweepValue::Memory(_) => workload.memory.map(|_| SweepConflict("-b", "size")),
        };
        workload.sweep.iter().find_map(conflict).map_or(Ok(()), Err)
    }

    pub(super) fn vcpus(&self) -> u32 {
        self.workload.vcpus.map_or(1, NonZeroU32::get)
    }

    pub(super) fn memory(&self) -> Bytes {
        self.workload.memory.unwrap_or(Bytes::gib(1))
    }

    /// Returns the options that affect results and are not at their defaults.
    pub(super) fn options(&self) -> BTreeMap<String, String> {
        let named = |value: &dyn ToString| Some(value.to_string());
        let list = |numbers: &[u32]| {
            let texts: Vec<_> = numbers.iter().map(u32::to_string).collect();
            (!texts.is_empty()).then(|| texts.join(","))
        };
        let phases = &self.workload.phases;
        let some_phases = (*phases != PhaseSelection::all()).then(|| phases.to_string());
        let address = |address: GuestAddress| format!("{:#x}", address.0);
        [
            ("phys-offset", self.guest.phys_offset.map(address)),
            ("ipa-bits", self.guest.ipa_bits.as_ref().and_then(|bits| named(bits))),
            ("pre-fault", self.host.pre_fault.then(|| "yes".to_owned())),
            ("pin", self.host.pin.as_ref().and_then(|list| named(list))),
            ("dirty-log", name_unless_default(self.host.dirty_log)),
            ("eager-split", self.host.eager_split.as_ref().and_then(|size| named(size))),
            ("vm-capability", list(&self.host.vm_capability)),
            ("phases", some_phases),
            ("log-untouched", self.workload.log_untouched.then(|| "yes".to_owned())),
            ("migrate", self.workload.migrate.as_ref().and_then(|n| named(n))),
            ("round-ms", self.workload.migrate.and_then(|_| named(&self.workload.round_ms))),
            ("guest-map", name_unless_default(self.guest.guest_map)),
            ("events", name_unless_default(self.output.events)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)))
        .collect()
    }

    pub(super) fn selected_phases(&self) -> Result<PhaseSelection, NothingLoggedError> {
        match self.workload.log_untouched {
            true => self.workload.phases.clone().without_create(),
            false => Ok(self.workload.phases.clone()),
        }
    }
}
