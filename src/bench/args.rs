// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `granule bench`, and the configurations that they describe.

use std::{collections::BTreeMap, error::Error, num::NonZeroU32, path::PathBuf, time::Duration};

use granule_pgtable_test::{
    config::{Migration, NothingLogged, PhaseSelection},
    harness::Plan,
    pgtable_vm::KvmConfig,
    software_machine::{DEFAULT_POLICY, SoftwareMachineConfig},
};
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    record::RunConfig,
    units::{Bytes, GuestAddress},
};

use super::values::{
    Clock, CpuList, DirtyLog, Engine, GuestMapping, Sweep, Switch, address, count, size,
    unless_default,
};

/// Options of `granule bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "Exit code: 0 done, 1 the test failed (a vCPU, a time limit, or a check), 2 the \
                  test cannot run as configured."
)]
pub struct Args {
    /// Backing of the memory under test
    #[arg(
        short = 's',
        long,
        value_name = "BACKING",
        default_value = "anonymous",
        help = format!("Backing of the memory under test: {}", Backing::all_names()),
        help_heading = "Workload"
    )]
    pub(super) backing: Backing,
    /// Size of the memory under test, with K, M or G [default: 1G]
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = size, help_heading = "Workload")]
    pub(super) memory: Option<Bytes>,
    /// Number of vCPUs [default: 1]
    #[arg(short = 'v', long, value_name = "VCPUS", value_parser = count, help_heading = "Workload")]
    pub(super) vcpus: Option<NonZeroU32>,
    /// Number of iterations, each from untouched memory
    #[arg(
        short = 'i',
        long,
        value_name = "N",
        default_value = "1",
        value_parser = count,
        help_heading = "Workload"
    )]
    pub(super) iterations: NonZeroU32,
    /// Run once for each value of vcpus=1,2,4 or size=64M,256M, in place of -v or -b; two sweeps make
    /// a matrix
    #[arg(
        long,
        value_name = "WHAT=VALUES",
        value_parser = Sweep::parse,
        help_heading = "Workload"
    )]
    pub(super) sweep: Vec<Sweep>,
    /// Phases to run, separated by commas; each adds the phases that it depends on. rebuild is the
    /// phase that kvm_page_table_test prints as KVM_ADJUST_MAPPINGS
    #[arg(
        long,
        value_name = "PHASES",
        default_value_t = PhaseSelection::all(),
        help_heading = "Workload"
    )]
    pub(super) phases: PhaseSelection,
    /// Omit create: log from untouched memory, so that update maps page by page
    #[arg(long, conflicts_with = "migrate", help_heading = "Workload")]
    pub(super) log_untouched: bool,
    /// Run a migration instead of the phases: the vCPUs write random pages, the host collects the
    /// dirty bitmap in this many rounds and copies its pages, and source and destination are compared
    #[arg(
        long,
        value_name = "ROUNDS",
        conflicts_with = "phases",
        value_parser = clap::value_parser!(u32).range(1..=10_000),
        help_heading = "Workload"
    )]
    pub(super) migrate: Option<u32>,
    /// With --migrate: length of a round in milliseconds
    #[arg(
        long,
        value_name = "MS",
        default_value = "10",
        requires = "migrate",
        value_parser = clap::value_parser!(u32).range(1..=60_000),
        help_heading = "Workload"
    )]
    pub(super) round_ms: u32,
    /// Seed of the schedule: delays the vCPUs' starts, repeatably; 0 delays nothing
    #[arg(
        long,
        value_name = "SEED",
        default_value = "0",
        help_heading = "Workload"
    )]
    pub(super) seed: u64,
    /// Limit of the time that the vCPUs work in one phase, in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "600",
        value_parser = count,
        help_heading = "Workload"
    )]
    pub(super) deadline: NonZeroU32,

    /// Guest mode, by name (P48V48_4K) or by its number in Linux 6.1 (2), which other kernels assign
    /// to other modes [default: the widest of the host]
    #[arg(short = 'm', long, value_name = "MODE", help_heading = "Guest")]
    pub(super) mode: Option<GuestMode>,
    /// Guest-physical address of the memory under test [default: the top of the mode's addresses]
    #[arg(
        short = 'p',
        long,
        value_name = "OFFSET",
        value_parser = address,
        help_heading = "Guest"
    )]
    pub(super) phys_offset: Option<GuestAddress>,
    /// Width of guest-physical addresses [default: the smallest that fits]
    #[arg(long, value_name = "BITS", help_heading = "Guest")]
    pub(super) ipa_bits: Option<u8>,
    /// Mapping of the memory under test by the guest's stage-1 tables
    #[arg(long, value_enum, default_value_t, help_heading = "Guest")]
    pub(super) guest_map: GuestMapping,

    /// Engine that runs the guest
    #[arg(long, value_enum, default_value_t, help_heading = "Host")]
    pub(super) engine: Engine,
    /// Populate the memory in the host first, so that no phase contains its faults and zeroing
    #[arg(long, help_heading = "Host")]
    pub(super) prefault: bool,
    /// Continue when the host provides other pages than configured; the results name them
    #[arg(long, help_heading = "Host")]
    pub(super) accept_fallback: bool,
    /// Pin the vCPUs to these CPUs (0-3,8), in turn if there are fewer than vCPUs
    #[arg(long, value_name = "CPULIST", value_parser = CpuList::parse, help_heading = "Host")]
    pub(super) pin: Option<CpuList>,
    /// Mode of dirty logging
    #[arg(long, value_enum, default_value_t, help_heading = "Host")]
    pub(super) dirty_log: DirtyLog,
    /// Split blocks eagerly when dirty logging starts, in chunks of SIZE (a block size of stage 2)
    #[arg(long, value_name = "SIZE", help_heading = "Host")]
    pub(super) eager_split: Option<Bytes>,
    /// With --engine model: policy of the fault path, linux-5.10, linux-5.10+series, linux-6.1,
    /// linux-6.12, linux-6.12+wait, linux-6.12+series or granule [default: granule]
    #[arg(long, value_name = "PRESET", help_heading = "Host")]
    pub(super) policy: Option<String>,
    /// With --engine model: clock of the results
    #[arg(long, value_enum, default_value_t, help_heading = "Host")]
    pub(super) clock: Clock,
    /// With --clock virtual: cost table of the simulated machine, kunpeng920, neoverse-n1 or the path
    /// of a file
    #[arg(long, value_name = "NAME", help_heading = "Host")]
    pub(super) cpu: Option<String>,

    /// Write one JSON object for each phase to this file; - is standard output
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) json: Option<PathBuf>,
    /// Count the kernel's events (guest faults, exits), which takes a little time
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    pub(super) events: Switch,
}

/// Error returned for an option that the selected engine does not have.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} requires --engine {1}; omit it, or select that engine")]
pub struct WrongEngine(pub(super) &'static str, pub(super) &'static str);

/// Error returned for an option that conflicts with a sweep.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} conflicts with --sweep {1}=…; omit one of them")]
pub struct SweepConflict(pub(super) &'static str, pub(super) &'static str);

/// Error returned for a wrong combination of `--clock` and `--cpu`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongClock {
    /// Costs for the real clock.
    #[error("--cpu requires --clock virtual; omit it, or add that")]
    CpuInRealTime,
    /// No costs for the virtual clock.
    #[error("--clock virtual requires a cost table; add --cpu kunpeng920")]
    NoCpu,
}

impl Args {
    /// Checks the options of all points, so that a wrong one is reported before the first run.
    pub(super) fn check(&self) -> Result<(), Box<dyn Error>> {
        Sweep::one_of_each(&self.sweep)?;
        self.check_sweeps()?;
        self.selected_phases()?;
        if self.engine == Engine::Model {
            for point in &self.points() {
                point.software_config()?.check()?;
            }
        }
        Ok(())
    }

    /// Returns these arguments for every point of the sweeps, or alone without a sweep.
    pub(super) fn points(&self) -> Vec<Self> {
        let mut points = vec![self.clone()];
        for sweep in &self.sweep {
            let at = |point: &Self| -> Vec<Self> {
                match sweep {
                    Sweep::Vcpus(all) => {
                        let with = |&vcpus| Self {
                            vcpus: Some(vcpus),
                            ..point.clone()
                        };
                        all.iter().map(with).collect()
                    }
                    Sweep::Memory(all) => {
                        let with = |&memory| Self {
                            memory: Some(memory),
                            ..point.clone()
                        };
                        all.iter().map(with).collect()
                    }
                }
            };
            points = points.iter().flat_map(at).collect();
        }
        points
    }

    /// Checks that no sweep conflicts with an option.
    pub(super) fn check_sweeps(&self) -> Result<(), SweepConflict> {
        let conflict = |sweep: &Sweep| match sweep {
            Sweep::Vcpus(_) => self.vcpus.map(|_| SweepConflict("-v", "vcpus")),
            Sweep::Memory(_) => self.memory.map(|_| SweepConflict("-b", "size")),
        };
        self.sweep.iter().find_map(conflict).map_or(Ok(()), Err)
    }

    /// Returns the number of vCPUs.
    pub(super) fn vcpus(&self) -> u32 {
        self.vcpus.map_or(1, NonZeroU32::get)
    }

    /// Returns the size of the memory under test.
    pub(super) fn memory(&self) -> Bytes {
        self.memory.unwrap_or(Bytes::gib(1))
    }

    /// Returns the plan of a run with this guest mode and size of the region.
    pub(super) fn plan(&self, mode: GuestMode, memory: Bytes) -> Plan {
        Plan {
            config: RunConfig {
                mode: mode.to_string(),
                backing: self.backing,
                memory,
                vcpus: self.vcpus(),
                seed: self.seed,
                iteration: 0,
                // The software machine in real time always populates its memory.
                prefault: self.prefault
                    || (self.engine, self.clock) == (Engine::Model, Clock::Real),
                options: self.options(),
            },
            iterations: self.iterations.get(),
            phases: self
                .selected_phases()
                .unwrap_or_else(|_| self.phases.clone()),
            migration: self.migrate.map(|rounds| Migration {
                rounds,
                round_time: Duration::from_millis(self.round_ms.into()),
            }),
            deadline: Duration::from_secs(self.deadline.get().into()),
            accept_fallback: self.accept_fallback,
        }
    }

    /// Returns the options that affect results and are not at their defaults.
    pub(super) fn options(&self) -> BTreeMap<String, String> {
        let named = |value: &dyn ToString| Some(value.to_string());
        [
            (
                "ipa-bits",
                self.ipa_bits.as_ref().and_then(|bits| named(bits)),
            ),
            ("pin", self.pin.as_ref().and_then(|list| named(list))),
            ("dirty-log", unless_default(self.dirty_log)),
            (
                "eager-split",
                self.eager_split.as_ref().and_then(|size| named(size)),
            ),
            (
                "log-untouched",
                self.log_untouched.then(|| "yes".to_owned()),
            ),
            ("migrate", self.migrate.as_ref().and_then(|n| named(n))),
            ("round-ms", self.migrate.and_then(|_| named(&self.round_ms))),
            ("guest-map", unless_default(self.guest_map)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)))
        .collect()
    }

    /// Returns the phases to run.
    pub(super) fn selected_phases(&self) -> Result<PhaseSelection, NothingLogged> {
        match self.log_untouched {
            true => self.phases.clone().logging_untouched(),
            false => Ok(self.phases.clone()),
        }
    }

    /// Returns the configuration of a machine on KVM.
    pub(super) fn kvm_config(&self) -> Result<KvmConfig, WrongEngine> {
        let given = [
            ("--policy", self.policy.is_some()),
            ("--clock", self.clock != Clock::default()),
            ("--cpu", self.cpu.is_some()),
        ];
        if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
            return Err(WrongEngine(option, "model"));
        }
        let vcpus = self.vcpus();
        Ok(KvmConfig {
            mode: self.mode,
            phys_offset: self.phys_offset,
            prefault: self.prefault,
            accept_fallback: self.accept_fallback,
            pin: self
                .pin
                .as_ref()
                .map_or_else(Vec::new, |list| list.for_vcpus(vcpus)),
            ipa_bits: self.ipa_bits,
            dirty: self.dirty_log.into(),
            eager_split: self.eager_split,
            guest_map: self.guest_map.into(),
            events: self.events == Switch::On,
            ..KvmConfig::new(self.backing, self.memory(), vcpus)
        })
    }

    /// Checks that the real clock has no cost table.
    pub(super) fn check_real_clock(&self) -> Result<(), WrongClock> {
        match (self.clock, &self.cpu) {
            (Clock::Real, Some(_)) => Err(WrongClock::CpuInRealTime),
            _ => Ok(()),
        }
    }

    /// Returns the cost table of the virtual clock.
    pub(super) fn simulated_cpu(&self) -> Result<&str, WrongClock> {
        self.cpu.as_deref().ok_or(WrongClock::NoCpu)
    }

    /// Returns the configuration of a software machine, which supports no options of KVM.
    pub(super) fn software_config(&self) -> Result<SoftwareMachineConfig, WrongEngine> {
        let given = [
            ("--phys-offset", self.phys_offset.is_some()),
            ("--pin", self.pin.is_some()),
            ("--ipa-bits", self.ipa_bits.is_some()),
            ("--dirty-log", self.dirty_log != DirtyLog::default()),
            ("--eager-split", self.eager_split.is_some()),
            ("--guest-map", self.guest_map != GuestMapping::default()),
            ("--migrate", self.migrate.is_some()),
        ];
        if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
            return Err(WrongEngine(option, "kvm"));
        }
        let policy = self.policy.as_deref().unwrap_or(DEFAULT_POLICY);
        Ok(SoftwareMachineConfig {
            backing: self.backing,
            memory: self.memory(),
            vcpus: self.vcpus(),
            policy: policy.to_owned(),
        })
    }
}
