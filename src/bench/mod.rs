// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule bench`.
//!
//! `-m -p -b -v -s` and the lines on standard output are those of the kernel's
//! `kvm_page_table_test`; the rest is ours. With `--json -` the records take standard output and
//! the lines go to standard error.

pub(super) mod values;

use std::{
    collections::BTreeMap,
    io::{self, Write},
    num::NonZeroU32,
    path::PathBuf,
    time::Duration,
};

use granule_pgtable_test::{
    config::{Migration, NothingLogged, PhaseSelection},
    harness::{self, HarnessError, Plan},
    log_lines::LogLines,
    machine::Machine,
    software_machine::{
        DEFAULT_POLICY, ModelConfig, ModelMachine,
        simulate::{SimulatedMachine, SimulationConfig},
    },
};
use granule_report::results::RecordWriter;
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    record::RunConfig,
    units::{Bytes, GuestAddress},
};

use super::{CommandResult, Outcome, report};
use granule_pgtable_test::pgtable_vm::{KvmConfig, KvmMachine};
use values::{
    Clock, CpuList, DirtyLog, Engine, Map, Sweep, Switch, address, count, size, unless_default,
};

/// Options of `granule bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "Exit code: 0 done, 1 the test failed (a vCPU, a time limit, or what was read back), \
                  2 it cannot be run as asked."
)]
pub struct Args {
    /// Backing of the memory under test
    #[arg(short = 's', long, value_name = "BACKING", default_value = "anonymous",
          help = format!("Backing of the memory under test: {}", Backing::all_names()))]
    backing: Backing,
    /// Size of the memory under test, with K, M or G; 1G if left out
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = size)]
    memory: Option<Bytes>,
    /// How many vCPUs; 1 if left out
    #[arg(short = 'v', long, value_name = "VCPUS", value_parser = count)]
    vcpus: Option<NonZeroU32>,
    /// Guest mode, by name (P48V48_4K) or by its number in the tests of Linux 6.1 (2), which later
    /// kernels gave to others; the host's default if left out
    #[arg(short = 'm', long, value_name = "MODE")]
    mode: Option<GuestMode>,
    /// Guest physical address of the memory under test; the top of the mode's if left out
    #[arg(short = 'p', long, value_name = "OFFSET", value_parser = address)]
    phys_offset: Option<GuestAddress>,
    /// How often to go through the phases, each time from untouched memory
    #[arg(short = 'i', long, value_name = "N", default_value = "1", value_parser = count)]
    iterations: NonZeroU32,
    /// Run once for each of these, vcpus=1,2,4 or size=64M,256M, instead of -v or -b; both sweeps
    /// make a matrix
    #[arg(long, value_name = "WHAT=VALUES", value_parser = Sweep::parse)]
    sweep: Vec<Sweep>,
    /// Which phases, with commas between them; each brings those it needs
    #[arg(long, value_name = "PHASES", default_value_t = PhaseSelection::all())]
    phases: PhaseSelection,
    /// Leave create out: log from memory that nobody has touched, so that update maps page by page
    /// what it touches
    #[arg(long, conflicts_with = "migrate")]
    log_untouched: bool,
    /// Instead of the phases a load like migration's: vCPUs write pages at random all the time,
    /// the dirty log is collected in so many rounds, what it names is copied, and in the end both
    /// sides must be equal
    #[arg(long, value_name = "ROUNDS", conflicts_with = "phases", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    migrate: Option<u32>,
    /// With --migrate: how many milliseconds a round lasts before its log is collected
    #[arg(
        long,
        value_name = "MS",
        default_value = "10",
        requires = "migrate",
        value_parser = clap::value_parser!(u32).range(1..=60_000)
    )]
    round_ms: u32,
    /// What runs the guest
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// With --engine model: whose fault path, linux-5.10, linux-5.10+series, linux-6.1, linux-6.12,
    /// linux-6.12+wait, linux-6.12+series or granule; granule's own if left out
    #[arg(long, value_name = "PRESET")]
    policy: Option<String>,
    /// With --engine model: whose time; virtual is a simulation of the machine that --cpu names
    #[arg(long, value_enum, default_value_t)]
    clock: Clock,
    /// With --clock virtual: what everything costs, kunpeng920, neoverse-n1 or the path of a table of
    /// one's own
    #[arg(long, value_name = "NAME")]
    cpu: Option<String>,
    /// Write one JSON object a phase to this file; - is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Populate the memory in the host first, so that its faults and zeroing are in no phase
    #[arg(long)]
    prefault: bool,
    /// Go on when the host gives other pages than asked for; the results say which
    #[arg(long)]
    accept_fallback: bool,
    /// Stagger the vCPUs' starts, the same way for the same seed; 0 does not
    #[arg(long, value_name = "SEED", default_value = "0")]
    seed: u64,
    /// Pin the vCPUs to these CPUs (0-3,8), in turn if there are fewer
    #[arg(long, value_name = "CPULIST", value_parser = CpuList::parse)]
    pin: Option<CpuList>,
    /// How many seconds the vCPUs may work in one phase
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = count)]
    deadline: NonZeroU32,
    /// Width of guest physical addresses; the smallest that fits if left out
    #[arg(long, value_name = "BITS")]
    ipa_bits: Option<u8>,
    /// How dirty pages are logged
    #[arg(long, value_enum, default_value_t)]
    dirty_log: DirtyLog,
    /// Split blocks where logging begins, in chunks of SIZE (a block size of stage 2), instead of at
    /// each fault
    #[arg(long, value_name = "SIZE")]
    eager_split: Option<Bytes>,
    /// How the guest's own tables map the memory under test
    #[arg(long, value_enum, default_value_t)]
    guest_map: Map,
    /// Count the kernel's events (guest faults, exits); counting takes a little time
    #[arg(long, value_enum, default_value_t)]
    events: Switch,
}

/// An option of the other engine.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is for --engine {1}: leave it out, or choose that engine")]
pub struct WrongEngine(&'static str, &'static str);

/// An option that is swept as well.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} and --sweep {1}=… say the same thing twice: leave one of them out")]
pub struct SaidTwice(&'static str, &'static str);

/// A simulated machine needs to be named, no other has a name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongClock {
    /// Costs for a clock that is real.
    #[error("--cpu is for --clock virtual: leave it out, or add that")]
    CpuInRealTime,
    /// No costs.
    #[error("--clock virtual needs to know whose: add --cpu kunpeng920")]
    NoCpu,
}

/// Carries `granule bench` out.
///
/// # Errors
/// What was asked for cannot be done; the error says why.
pub fn run(args: Args) -> CommandResult {
    Sweep::one_of_each(&args.sweep)?;
    args.sweeps_fit()?;
    args.phases()?;
    let mut json = None;
    let points = args.points();
    if args.engine == Engine::Model {
        // What the last point asks for in vain should not be found out behind the others.
        for point in &points {
            point.model()?.check()?;
        }
    }
    for point in &points {
        if run_one(point, points.len() as u64, &mut json)? == Outcome::Failed {
            return Ok(Outcome::Failed);
        }
    }
    Ok(Outcome::Done)
}

/// Runs the test once, one of so many runs; `json` is made by the first that can be made at all.
fn run_one(args: &Args, runs: u64, json: &mut Option<RecordWriter>) -> CommandResult {
    let (mut machine, mode): (Box<dyn Machine>, GuestMode) = match args.engine {
        Engine::Kvm => {
            let machine = KvmMachine::new(args.machine()?)?;
            let mode = machine.mode();
            (Box::new(machine), mode)
        }
        Engine::Model => {
            let mode = args.mode.unwrap_or(GuestMode::P48V48_4K);
            let machine: Box<dyn Machine> = match args.clock {
                Clock::Real => {
                    args.clock_fits()?;
                    Box::new(ModelMachine::new(&args.model()?)?)
                }
                Clock::Virtual => {
                    let (model, cpu) = (args.model()?, args.simulated_cpu()?);
                    let config = SimulationConfig::new(model, cpu, args.prefault)?;
                    Box::new(SimulatedMachine::new(&config)?)
                }
            };
            (machine, mode)
        }
    };
    let plan = Plan {
        config: RunConfig {
            mode: mode.to_string(),
            backing: args.backing,
            memory: machine.region().size,
            vcpus: args.vcpus(),
            seed: args.seed,
            iteration: 0,
            // The software machine in real time always does.
            prefault: args.prefault || (args.engine, args.clock) == (Engine::Model, Clock::Real),
            options: args.options(),
        },
        iterations: args.iterations.get(),
        phases: args.phases()?,
        migration: args.migrate.map(|rounds| Migration {
            rounds,
            round_time: Duration::from_millis(args.round_ms.into()),
        }),
        deadline: Duration::from_secs(args.deadline.get().into()),
        accept_fallback: args.accept_fallback,
    };
    // Behind the machine: a run that cannot be made leaves an older file alone.
    if let (None, Some(path)) = (&json, &args.json) {
        *json = Some(RecordWriter::create(path, runs * plan.records())?);
    }
    let to: Box<dyn Write> = if args
        .json
        .as_ref()
        .is_some_and(|path| path.as_os_str() == "-")
    {
        Box::new(io::stderr())
    } else {
        Box::new(io::stdout())
    };
    let mut lines = LogLines::new(to, plan.config.clone(), plan.iterations);
    let result = harness::run(machine.as_mut(), &plan, &mut |progress| {
        lines.print(&progress)?;
        if let (harness::Progress::Phase(record), Some(json)) = (&progress, json.as_mut()) {
            json.write(record)?;
        }
        Ok(())
    });
    match result {
        Ok(()) => Ok(Outcome::Done),
        Err(error @ (HarnessError::Start(_) | HarnessError::Observer(_))) => Err(error.into()),
        Err(error) => {
            report(&error);
            Ok(Outcome::Failed)
        }
    }
}

impl Args {
    /// These arguments for every point of the sweeps; alone where there is none.
    fn points(&self) -> Vec<Self> {
        let mut points = vec![self.clone()];
        for sweep in &self.sweep {
            let at = |point: &Self| -> Vec<Self> {
                let point = || point.clone();
                match sweep {
                    Sweep::Vcpus(all) => {
                        let with = |&vcpus| Self {
                            vcpus: Some(vcpus),
                            ..point()
                        };
                        all.iter().map(with).collect()
                    }
                    Sweep::Memory(all) => {
                        let with = |&memory| Self {
                            memory: Some(memory),
                            ..point()
                        };
                        all.iter().map(with).collect()
                    }
                }
            };
            points = points.iter().flat_map(at).collect();
        }
        points
    }

    /// A sweep and an option that says the same thing otherwise.
    fn sweeps_fit(&self) -> Result<(), SaidTwice> {
        let given = |sweep: &Sweep| match sweep {
            Sweep::Vcpus(_) => self.vcpus.map(|_| SaidTwice("-v", "vcpus")),
            Sweep::Memory(_) => self.memory.map(|_| SaidTwice("-b", "size")),
        };
        self.sweep.iter().find_map(given).map_or(Ok(()), Err)
    }

    fn vcpus(&self) -> u32 {
        self.vcpus.map_or(1, NonZeroU32::get)
    }

    fn memory(&self) -> Bytes {
        self.memory.unwrap_or(Bytes::gib(1))
    }

    /// What changes figures and is not at its default.
    fn options(&self) -> BTreeMap<String, String> {
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

    fn phases(&self) -> Result<PhaseSelection, NothingLogged> {
        match self.log_untouched {
            true => self.phases.clone().logging_untouched(),
            false => Ok(self.phases.clone()),
        }
    }

    fn machine(&self) -> Result<KvmConfig, WrongEngine> {
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

    fn clock_fits(&self) -> Result<(), WrongClock> {
        match (self.clock, &self.cpu) {
            (Clock::Real, Some(_)) => Err(WrongClock::CpuInRealTime),
            _ => Ok(()),
        }
    }

    fn simulated_cpu(&self) -> Result<&str, WrongClock> {
        self.cpu.as_deref().ok_or(WrongClock::NoCpu)
    }

    /// The software machine has no KVM to hand these on to.
    fn model(&self) -> Result<ModelConfig, WrongEngine> {
        let given = [
            ("--phys-offset", self.phys_offset.is_some()),
            ("--pin", self.pin.is_some()),
            ("--ipa-bits", self.ipa_bits.is_some()),
            ("--dirty-log", self.dirty_log != DirtyLog::default()),
            ("--eager-split", self.eager_split.is_some()),
            ("--guest-map", self.guest_map != Map::default()),
            ("--migrate", self.migrate.is_some()),
        ];
        if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
            return Err(WrongEngine(option, "kvm"));
        }
        Ok(ModelConfig {
            backing: self.backing,
            memory: self.memory(),
            vcpus: self.vcpus(),
            policy: self
                .policy
                .clone()
                .unwrap_or_else(|| DEFAULT_POLICY.to_owned()),
        })
    }
}

#[cfg(test)]
mod tests;
