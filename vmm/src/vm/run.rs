// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs a VM on the main thread: opens files, confines the process, and boots the VM until its guest no
//! longer reboots.

use std::{path::Path, time::Instant};

use granule_types::record::Host;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{
    api::Api,
    boot::RunContext,
    config::{RunOptions, VmConfig},
    console_io,
    landlock::restrict_files,
    open_files::{OpenError, OpenFiles},
    outcome::{RunError, VmOutcome, io_error},
    seccomp::{ThreadRole, confine_if},
    signals::Signals,
    socket::BoundSocket,
    stats::HostCounters,
    stats_file::StatsFile,
};
use crate::arch::guest;

/// Runs a VM, and builds it again after each reset if `options` request that.
///
/// # Errors
/// [`RunError`].
pub fn run(config: &VmConfig, options: &RunOptions) -> Result<VmOutcome, RunError> {
    guest::check_supported()?;
    raise_file_limit();
    let signals = Signals::block().map_err(io_error("blocking signals (signalfd)"))?;
    let mut stats_file = options.stats.as_deref().map(open_stats_file).transpose()?;
    let files = OpenFiles::new(config)?;
    let socket_path = options.api_socket.as_deref();
    let socket = socket_path
        .map(|path| BoundSocket::new(path).map_err(OpenError::file("--api-socket", path)))
        .transpose()?;
    let counted = stats_file.is_some() || socket.is_some();
    // Opening kernel events needs privileges that are dropped below.
    let mut counters = counted.then(HostCounters::open);
    if stats_file.is_some() && counters.as_ref().is_some_and(HostCounters::is_empty) {
        log::warn!(
            "--stats: kernel events are not counted, so stage-2 aborts and exits are missing: run as \
             root (--user drops its privileges later) with a tracefs at /sys/kernel/tracing"
        );
    }
    let api = confine_process(options, socket)?;
    let output =
        console_io::stdout(options.sandbox).map_err(io_error("opening the console output"))?;
    let mut started = options.started;
    let mut boot_count = 1;
    let outcome = loop {
        let context = RunContext {
            config,
            options,
            files: &files,
            signals: &signals,
            api: api.as_ref(),
            output: &output,
            counted,
            boot_count,
        };
        let outcome = context.boot(started, stats_file.as_mut(), counters.take());
        if options.reboot && matches!(outcome, Ok(VmOutcome::Reset)) {
            started = Instant::now();
            boot_count += 1;
            continue;
        }
        break outcome;
    };
    let unwritten = output.finish();
    drop(api);
    // A signal terminates the process from here on, even if its standard error is blocked.
    signals.release();
    if unwritten > 0 {
        log::warn!("the last {unwritten} bytes of console output were not read");
    }
    outcome
}

/// Raises the limit of open files to its maximum: each vCPU needs several.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::debug!("the limit of open files is not raised: {error}");
    }
}

fn open_stats_file(path: &Path) -> Result<StatsFile, RunError> {
    let host = Host::of_this_machine()?;
    Ok(StatsFile::open(path, host).map_err(OpenError::file("--stats", path))?)
}

/// Applies Landlock, user and seccomp filter to the process, and serves the control socket.
fn confine_process(
    options: &RunOptions,
    socket: Option<BoundSocket>,
) -> Result<Option<Api>, RunError> {
    let confine = options.sandbox;
    let path = options.api_socket.as_deref().unwrap_or(Path::new(""));
    if confine {
        let folder = socket.as_ref().map(|_| {
            let folder = path.parent();
            folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
        });
        restrict_files(folder)?;
    }
    if let Some(identity) = options.identity {
        if let Some(socket) = &socket {
            socket.set_owner(identity).map_err(OpenError::file("--api-socket", path))?;
        }
        identity.assume()?;
    }
    let setup = move || confine_if(confine, ThreadRole::Api);
    let api = socket
        .map(|socket| Api::serve(socket, setup).map_err(OpenError::file("--api-socket", path)))
        .transpose()?;
    if confine {
        ThreadRole::Main.confine()?;
    }
    Ok(api)
}
