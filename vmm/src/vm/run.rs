// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs a VM on the main thread: opens files, confines the process, and boots the VM again after
//! each reset. A boot lasts from building the VM to the guest's exit.

use std::{
    cell::Cell,
    mem,
    path::Path,
    process,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use granule_types::{error_text, record::HostInfo, units::Bytes};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vmm_sys_util::eventfd::EventFd;

use super::{
    api::{ApiServer, BoundSocket},
    boot_stats::{MAX_MARKS, StatsFile},
    builder::{self, Vm, VmConnections},
    change_log::{self, ChangeLog},
    config::{RunOptions, SnapshotConfig, VmConfig, VmSource},
    console_io::{self, ConsoleChannels, MatchCallback},
    control::VmController,
    event_loop::EventLoop,
    fatal_signals::report_bus_errors,
    fault_stalls::FaultStalls,
    open_files::{MemorySource, OpenFiles, Openers, StartFiles},
    outcome::{VmError, VmOutcome, failed},
    privileges::Identity,
    sandbox::restrict_file_access,
    save,
    seccomp::{ThreadRole, confine_optionally},
    signals::Signals,
    snapshot::{OpenSnapshot, SnapshotDirectory},
    stats::{HostCounters, StatsReader, refreshed_stage2_table_bytes},
    terminal::Terminal,
};
use crate::{
    affinity::check_cpus,
    arch::guest,
    devices::{BootTimer, console_input::InputConsole, console_output::ConsoleOutput},
    folder::folder_of,
    memory::{GuestMemory, MemoryError, Smaps, on_demand::OnDemand},
    scoped_thread::ScopedThread,
};

/// Runs a VM, and builds it again after each reset if `options` request that and a kernel boots. The
/// reset of a guest from a snapshot ends the run.
///
/// # Errors
/// The VM cannot be built, or a vCPU or device fails.
pub fn run(source: &VmSource, options: &RunOptions) -> Result<VmOutcome, VmError> {
    guest::check_supported()?;
    raise_file_limit();
    report_bus_errors()?;
    let signals = Signals::block().map_err(failed("blocking signals (signalfd) failed"))?;
    let mut stats_file = options.stats.as_deref().map(open_stats_file).transpose()?;
    let (config, start) = open_start(source)?;
    let files = OpenFiles::new(&config, start, openers(source, options.identity))?;
    let snapshots = options.snapshots.as_ref();
    if let Some(snapshots) = snapshots {
        check_snapshots(snapshots, &config)?;
    }
    let snapshots = snapshots.map(|snapshots| SnapshotDirectory::open(&snapshots.directory));
    let snapshots = snapshots.transpose()?;
    let socket_path = options.api_socket.as_deref();
    let socket = socket_path
        .map(|path| BoundSocket::new(path).map_err(failed(option_and_path("--api-socket", path))))
        .transpose()?;
    let collects_statistics = stats_file.is_some() || socket.is_some();
    // Opening the counters needs privileges that are dropped below.
    let mut counters = collects_statistics.then(HostCounters::open);
    if stats_file.is_some() && counters.as_ref().is_some_and(HostCounters::is_empty) {
        log::warn!(
            "--stats: kernel events are not counted, so stage-2 aborts and exits are missing: run \
             as root (--user drops its privileges later) with a tracefs at /sys/kernel/tracing"
        );
    }
    if let Some(list) = &options.vcpu_cpus {
        check_cpus(list.cpus()).map_err(failed("--pin"))?;
    }
    if options.fault_stalls.is_some() && !collects_statistics {
        let text = "--fault-stalls: nothing shows the stalls; add --stats or --api-socket";
        return Err(VmError::Refused(text.to_owned()));
    }
    let starts_paused = matches!(source, VmSource::Restore(restore) if restore.is_paused);
    if starts_paused && socket.is_none() {
        let text = "--restore …,paused=on: no request can resume the VM; add --api-socket";
        return Err(VmError::Refused(text.to_owned()));
    }
    let fault_stalls = options.fault_stalls.map(FaultStalls::open).transpose();
    let mut fault_stalls = fault_stalls.map_err(failed(
        "--fault-stalls needs root and a tracefs, and for sizes a kernel with CONFIG_KPROBE_EVENTS",
    ))?;
    let api = confine_process(options, socket, snapshots.as_ref())?;
    let output = console_io::start_console_output(options.is_sandboxed)
        .map_err(failed("opening the console output failed"))?;
    let mut start_time = options.start_time;
    let mut boot_count = 1;
    let kept = KeptState::default();
    let outcome = loop {
        let context = RunContext {
            config: &config,
            options,
            files: &files,
            snapshots: snapshots.as_ref(),
            signals: &signals,
            api: api.as_ref(),
            output: &output,
            collects_statistics,
            starts_paused,
            kept: &kept,
            boot_count,
        };
        let outcome =
            context.boot(start_time, stats_file.as_mut(), counters.take(), fault_stalls.take());
        let can_boot = matches!(files.start, StartFiles::Boot(_));
        if can_boot && options.reboots_on_reset && matches!(outcome, Ok(VmOutcome::Reset)) {
            start_time = Instant::now();
            boot_count += 1;
            continue;
        }
        break outcome;
    };
    let unwritten = output.finish();
    drop(api);
    // A released signal can terminate the process even while a write to standard error blocks.
    signals.release();
    warn_of_unwritten(unwritten);
    outcome
}

fn warn_of_unwritten(bytes: usize) {
    if bytes > 0 {
        log::warn!("the last {bytes} bytes of console output were not read");
    }
}

/// Checks that this VM can be saved.
fn check_snapshots(snapshots: &SnapshotConfig, config: &VmConfig) -> Result<(), VmError> {
    let refused = |option| {
        move |reason| {
            VmError::Refused(format!("--snapshot DIR{option} {reason}: remove one of the options"))
        }
    };
    save::check_completeness(config).map_err(refused(""))?;
    match snapshots.is_incremental {
        true => change_log::check_writers(config).map_err(refused(",incremental=on")),
        false => Ok(()),
    }
}

/// Opens the kernel or the snapshot. Returns the VM's configuration with it.
fn open_start(source: &VmSource) -> Result<(VmConfig, StartFiles), VmError> {
    Ok(match source {
        VmSource::Boot(config) => (VmConfig::clone(config), StartFiles::boot(config)?),
        VmSource::Restore(restore) => {
            let snapshot = OpenSnapshot::open(&restore.directory)?;
            let mut config = snapshot.state.config.clone();
            restore.devices.replace(&snapshot.name, &mut config.devices)?;
            (config, StartFiles::restore(snapshot, &restore.mode)?)
        }
    })
}

/// Returns who opens the devices: `identity` those that a snapshot names, which may be a guest's words.
fn openers(source: &VmSource, identity: Option<Identity>) -> Openers {
    let VmSource::Restore(restore) = source else {
        return Openers::default();
    };
    let unless = |is_named: bool| identity.filter(|_| !is_named);
    Openers {
        disks: unless(!restore.devices.disks.is_empty()),
        taps: unless(!restore.devices.nets.is_empty()),
    }
}

/// Raises the soft limit of open files to the hard limit, because each vCPU needs several files.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::debug!("the limit of open files is not raised: {error}");
    }
}

fn open_stats_file(path: &Path) -> Result<StatsFile, VmError> {
    let host = HostInfo::of_this_host()?;
    StatsFile::open(path, host).map_err(failed(option_and_path("--stats", path)))
}

fn option_and_path(option: &str, path: &Path) -> String {
    format!("{option} {}", path.display())
}

/// Applies Landlock rules, user and seccomp filter to the process, and serves the control socket.
fn confine_process(
    options: &RunOptions,
    socket: Option<BoundSocket>,
    directory: Option<&SnapshotDirectory>,
) -> Result<Option<ApiServer>, VmError> {
    const CONFINE_ERROR: &str = "the process cannot be confined";
    let confine = options.is_sandboxed;
    let path = options.api_socket.as_deref().unwrap_or(Path::new(""));
    if confine {
        let folder = socket.as_ref().map(|_| folder_of(path));
        let snapshots = options.snapshots.as_ref();
        let snapshots = snapshots.map(|snapshots| snapshots.directory.as_path());
        restrict_file_access(folder, snapshots).map_err(failed(CONFINE_ERROR))?;
    }
    if let Some(identity) = options.identity {
        if let Some(socket) = &socket {
            socket.set_owner(identity).map_err(failed(option_and_path("--api-socket", path)))?;
        }
        if let Some(directory) = directory {
            directory.set_owner(identity).map_err(failed(directory.description()))?;
        }
        identity.drop_privileges().map_err(failed("privileges cannot be dropped"))?;
    }
    let setup = move || confine_optionally(confine, ThreadRole::Api);
    let api = socket
        .map(|socket| {
            ApiServer::serve(socket, setup).map_err(failed(option_and_path("--api-socket", path)))
        })
        .transpose()?;
    if confine {
        ThreadRole::Main.confine().map_err(failed(CONFINE_ERROR))?;
    }
    Ok(api)
}

/// State that a reset of the guest keeps.
#[derive(Default)]
struct KeptState {
    /// Target of the balloon at the end of the last boot.
    balloon_target: Cell<Bytes>,
    /// Memory of the last boot, if the guest has reset itself.
    memory: Cell<Option<GuestMemory>>,
    /// Bytes of a file or pipe that the guest of the last boot has not read from its console.
    unread_input: Cell<Vec<u8>>,
}

/// Inputs of a boot. All except `boot_count` are the same for every boot.
struct RunContext<'a> {
    config: &'a VmConfig,
    options: &'a RunOptions,
    files: &'a OpenFiles,
    snapshots: Option<&'a SnapshotDirectory>,
    signals: &'a Signals,
    api: Option<&'a ApiServer>,
    output: &'a ConsoleOutput,
    collects_statistics: bool,
    /// Leaves the VM paused until a request resumes it.
    starts_paused: bool,
    kept: &'a KeptState,
    boot_count: u32,
}

impl RunContext<'_> {
    /// Builds the VM and runs it until the guest exits or is stopped.
    fn boot(
        &self,
        start_time: Instant,
        stats_file: Option<&mut StatsFile>,
        counters: Option<HostCounters>,
        fault_stalls: Option<FaultStalls>,
    ) -> Result<VmOutcome, VmError> {
        let (wake, quit) = (new_event()?, new_event()?);
        let counters = counters.or_else(|| self.collects_statistics.then(HostCounters::open));
        let fault_stalls = self.start_fault_stalls(fault_stalls)?;
        let table_bytes_before =
            self.collects_statistics.then(refreshed_stage2_table_bytes).flatten();
        let (sender, marks) = mpsc::sync_channel(MAX_MARKS);
        let (mut vm, input_console) = self.build(start_time, &wake, &sender)?;
        vm.pending_stalls = fault_stalls.as_ref().map(FaultStalls::pending);
        if let Some(balloon) = vm.balloon.as_ref().filter(|_| self.boot_count > 1) {
            balloon.set_target(self.kept.balloon_target.get());
        }
        let terminal = Terminal::enter_raw_mode()
            .map_err(failed("setting the terminal to raw mode failed"))?;
        let input = console_io::forward_stdin(
            input_console,
            &vm.serial,
            self.kept.unread_input.take(),
            terminal.as_ref(),
            clone_event(&quit)?,
            self.options.is_sandboxed,
        )
        .map_err(failed("opening the console input failed"))?;
        let reader = StatsReader {
            counters: counters.unwrap_or_default(),
            statistics: mem::take(&mut vm.statistics),
            exits: Arc::clone(vm.vcpus.exit_counters()),
            zones: vm.memory.regions().to_vec(),
            fault_stalls,
            fill_times: vm.on_demand.as_ref().map(OnDemand::fill_times),
            table_bytes_before,
        };
        let snapshots = self.options.snapshots.as_ref();
        let is_incremental = snapshots.is_some_and(|snapshots| snapshots.is_incremental);
        let mut controller = VmController::new(
            self.config,
            &vm,
            reader,
            stats_file.is_some(),
            self.boot_count,
            self.snapshots,
            is_incremental.then(ChangeLog::default),
        );
        granule_types::mark::begin_guest();
        if self.collects_statistics {
            // A restored guest has booted.
            let is_restored = matches!(self.files.start, StartFiles::Restore(..));
            let next = if is_restored { "run" } else { "boot" };
            controller.end_phase(next, start_time.elapsed());
        }
        if !self.starts_paused {
            vm.resume()?;
        }
        let event_loop = EventLoop {
            signals: self.signals,
            wake_event: &wake,
            quit_event: &quit,
            marks: &marks,
            start_time,
            terminal: terminal.as_ref(),
            api: self.api,
        };
        let outcome = event_loop.run(&mut controller);
        let outcome = outcome.map_err(failed("waiting for the guest failed"))?;
        let target = vm.balloon.as_ref().map(|balloon| balloon.target());
        self.kept.balloon_target.set(target.unwrap_or_default());
        self.kept.memory.set((outcome == VmOutcome::Reset).then(|| vm.memory.clone()));
        let written = self.finish_stats(&mut controller, &outcome, start_time, stats_file);
        self.write_order(&vm);
        written?;
        drop(controller);
        // Keys that are typed from now on, such as the one that ends the program, are for the next boot.
        let input = input.stop();
        drop(vm);
        // Earlier ones were for the boot that the user saw.
        if terminal.is_none() {
            self.kept.unread_input.set(input.unread());
        }
        drop(terminal);
        Ok(outcome)
    }

    /// Starts to read the stalls, of the first boot as they were opened before privileges were dropped.
    fn start_fault_stalls(
        &self,
        opened: Option<FaultStalls>,
    ) -> Result<Option<FaultStalls>, VmError> {
        let Some(detail) = self.options.fault_stalls else { return Ok(None) };
        let opened = opened.map_or_else(|| FaultStalls::open(detail), Ok);
        let mut stalls = match opened {
            Ok(stalls) => stalls,
            Err(error) => {
                log::warn!("--fault-stalls: this boot is not measured: {error}");
                return Ok(None);
            }
        };
        stalls.start().map_err(failed("a thread cannot be started"))?;
        Ok(Some(stalls))
    }

    /// Builds the VM. A signal during this call terminates the process.
    fn build(
        &self,
        start_time: Instant,
        wake: &EventFd,
        marks: &mpsc::SyncSender<(u8, Duration)>,
    ) -> Result<(Vm, Option<InputConsole>), VmError> {
        let pattern = match &self.options.init_text {
            None => None,
            Some(text) => {
                let on_mark = mark_sender(start_time, marks, wake)?;
                let on_match = move || on_mark(BootTimer::INIT_MARK);
                Some((text.as_str(), Box::new(on_match) as MatchCallback))
            }
        };
        let console = self.config.devices.has_console;
        let channels = ConsoleChannels::new(self.output, console, pattern)
            .map_err(failed("creating a pipe failed"))?;
        let _terminator = self.terminate_on_signal()?;
        let cpus = self.options.vcpu_cpus.as_ref();
        let vm = builder::build(
            self.config,
            self.files,
            VmConnections {
                earlier_memory: self.kept.memory.take(),
                serial_output: channels.serial_output,
                console_output: self.output.clone(),
                console: channels.console,
                boot_timer: BootTimer::new(Box::new(mark_sender(start_time, marks, wake)?)),
                guest_exit: clone_event(wake)?,
                confines_vcpus: self.options.is_sandboxed,
                vcpu_cpus: cpus.map_or_else(Vec::new, |list| list.for_vcpus(self.config.vcpus)),
                collects_statistics: self.collects_statistics,
            },
        )?;
        Ok((vm, channels.input_console))
    }

    /// Starts a thread that removes the control socket and ends the process when a signal arrives.
    fn terminate_on_signal(&self) -> Result<ScopedThread, VmError> {
        let socket = self.api.map(|api| Arc::clone(&api.file));
        let output = self.output.clone();
        let run = if self.boot_count == 1 { "ran" } else { "ran again" };
        let terminate = move |signal: &'static str| {
            if let Some(socket) = socket {
                socket.remove();
            }
            // What the guest has written before a reset.
            warn_of_unwritten(output.finish());
            eprintln!("granule: stopped by {signal} before the guest {run}");
            process::exit(0)
        };
        let thread = self.signals.terminate_on_signal(terminate);
        thread.map_err(failed("waiting for signals failed"))
    }

    /// Writes the order of accesses to memory, if this run records it.
    fn write_order(&self, vm: &Vm) {
        if let StartFiles::Restore(_, MemorySource::OnDemand(_, Some(file))) = &self.files.start
            && file.order().is_none()
            && let Some(demand) = &vm.on_demand
            && let Err(error) = file.write(&demand.recorded())
        {
            log::warn!("the order of accesses is lost: {}", error_text(&error));
        }
    }

    /// Ends the last phase and writes the statistics of this boot.
    fn finish_stats(
        &self,
        controller: &mut VmController<'_>,
        outcome: &VmOutcome,
        start_time: Instant,
        stats_file: Option<&mut StatsFile>,
    ) -> Result<(), VmError> {
        if self.collects_statistics {
            controller.end_phase("end", start_time.elapsed());
        }
        let warn = |error: MemoryError| log::warn!("guest memory: {}", error_text(&error));
        // Memory that is being filled is in small pages.
        let is_filled =
            controller.vm.on_demand.as_ref().is_none_or(|demand| demand.check_complete().is_ok());
        match is_filled.then(Smaps::read) {
            None => {}
            Some(Ok(smaps)) => controller.vm.memory.regions().iter().for_each(|ram| {
                ram.checked_resident_pages_in(&smaps).map_or_else(warn, drop);
            }),
            Some(Err(error)) => warn(error),
        }
        let Some(file) = stats_file else {
            return Ok(());
        };
        let stats = &controller.boot_stats;
        let Err(error) = file.write(self.config, self.boot_count, outcome.name(), stats) else {
            return Ok(());
        };
        if *outcome != VmOutcome::Reset || !self.options.reboots_on_reset {
            return Err(failed(option_and_path("--stats", &file.path))(error));
        }
        // A failed write of statistics must not stop a guest that reboots.
        let path = file.path.display();
        log::error!("--stats {path}: the statistics of a boot are lost: {error}");
        Ok(())
    }
}

/// Returns a callback that sends a mark and its time since `start_time` to the main thread.
fn mark_sender(
    start_time: Instant,
    marks: &mpsc::SyncSender<(u8, Duration)>,
    wake: &EventFd,
) -> Result<impl Fn(u8) + Send + 'static, VmError> {
    let (marks, wake) = (marks.clone(), clone_event(wake)?);
    Ok(move |mark| {
        let time = start_time.elapsed();
        if mark == BootTimer::INIT_MARK {
            granule_types::mark::begin_guest_init();
        }
        // The main thread reads none while it saves memory; marks that do not fit are lost.
        let _ = marks.try_send((mark, time));
        let _ = wake.write(1);
    })
}

fn new_event() -> Result<EventFd, VmError> {
    EventFd::new(libc::EFD_NONBLOCK).map_err(failed("creating an eventfd failed"))
}

fn clone_event(event: &EventFd) -> Result<EventFd, VmError> {
    event.try_clone().map_err(failed("duplicating an eventfd failed"))
}
