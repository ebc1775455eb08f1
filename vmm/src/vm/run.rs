// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From a machine's start to its end, on the main thread.

use std::{
    io, mem,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use granule_types::{host::FactsError, record::Host};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Resource, Rlimit, getrlimit, setrlimit},
    time::Timespec,
};
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::{
    api::Api,
    build::{BuildError, Ends},
    config::{Session, VmConfig},
    console_io::{self, Ways},
    control::Controls,
    open_files::Opened,
    privileges::PrivilegeError,
    sandbox::{SandboxError, Thread, Use, restrict_files},
    signals::{Asked, Signals},
    socket::Bound,
    stats::{self, Counters, FIRST_MINUTE, Meter},
    stats_file::Report,
    terminal::Terminal,
    vcpu::{End, Wanted},
};
use crate::{
    arch::linux,
    devices::{BootTimer, console_output::ConsoleOutput},
    scoped_thread::{ScopedThread, borrow_event},
};

/// Why a machine was not run to its end.
#[derive(Debug, Error)]
pub enum RunError {
    /// There is none.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The process cannot be confined.
    #[error("this process cannot be confined")]
    Sandbox(#[from] SandboxError),
    /// The process cannot become another user.
    #[error("this process cannot give up its rights")]
    Privileges(#[from] PrivilegeError),
    /// The main thread's own files.
    #[error("{doing}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A file or socket that an option names.
    #[error("{option} {path}", path = path.display())]
    File {
        /// The option.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// What is known of this host.
    #[error(transparent)]
    Facts(#[from] FactsError),
}

fn doing(doing: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::Io { doing, source }
}

fn file<'a>(option: &'static str, path: &'a Path) -> impl Fn(io::Error) -> RunError + 'a {
    move |source| RunError::File {
        option,
        path: path.to_owned(),
        source,
    }
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The guest switched itself off.
    Off,
    /// The guest reset itself, and that is the end.
    Reset,
    /// It was asked to end from outside.
    Stopped(&'static str),
    /// It cannot go on.
    Failed(String),
}

impl Ended {
    const fn name(&self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Reset => "reset",
            Self::Stopped(_) => "stopped",
            Self::Failed(_) => "failed",
        }
    }
}

/// Runs machines, one after another while the guest resets itself and the session says so.
///
/// # Errors
/// A machine cannot be built, or the main thread cannot wait for it.
pub fn run(config: &VmConfig, session: &Session) -> Result<Ended, RunError> {
    linux::check().map_err(BuildError::from)?;
    open_as_many_files_as_allowed();
    let signals = Signals::block().map_err(doing("blocking signals (signalfd)"))?;
    let mut report = match &session.stats {
        Some(path) => {
            let host = Host::of_this_machine()?;
            Some(Report::open(path, host).map_err(file("--stats", path))?)
        }
        None => None,
    };
    let opened = Opened::new(config)?;
    let socket = session.api_socket.as_deref();
    let bound = socket.map(|path| Bound::new(path).map_err(file("--api-socket", path)));
    let bound = bound.transpose()?;
    let counted = report.is_some() || bound.is_some();
    // The kernel's events can be opened with rights that are given up below.
    let mut counters = counted.then(Counters::open);
    if report.is_some() && counters.as_ref().is_some_and(Counters::is_empty) {
        log::warn!(
            "--stats: the kernel's events cannot be counted, so guest faults and exits by KVM's \
             tracepoints are left out: that takes root (--user gives its rights up once all is open) \
             and a tracefs at /sys/kernel/tracing"
        );
    }
    let confine = session.sandbox;
    if confine {
        let folder = socket.map(|path| {
            let folder = path
                .parent()
                .filter(|folder| !folder.as_os_str().is_empty());
            (folder.unwrap_or(Path::new(".")).to_owned(), Use::RemoveIn)
        });
        restrict_files(folder.as_slice())?;
    }
    if let Some(identity) = session.identity {
        if let (Some(bound), Some(path)) = (&bound, socket) {
            bound
                .give_to(identity)
                .map_err(file("--api-socket", path))?;
        }
        identity.assume()?;
    }
    let api = match (bound, socket) {
        (Some(bound), Some(path)) => Some(
            bound
                .serve(move || confined(confine, Thread::Api))
                .map_err(file("--api-socket", path))?,
        ),
        _ => None,
    };
    if confine {
        Thread::Main.confine()?;
    }
    let outlet = console_io::outlet(confine).map_err(doing("writing the console's output"))?;
    let mut started = session.started;
    let mut lives = 1;
    let end = loop {
        let around = Around {
            config,
            session,
            opened: &opened,
            signals: &signals,
            api: api.as_ref(),
            outlet: &outlet,
            lives,
        };
        let end = live(&around, started, report.as_mut(), counters.take());
        if session.reboot && matches!(end, Ok(Ended::Reset)) {
            started = Instant::now();
            lives += 1;
            continue;
        }
        break end;
    };
    let left = outlet.finish();
    drop(api);
    // From here on a signal ends the process even where its own last words find no reader.
    signals.release();
    if left > 0 {
        log::warn!("the last {left} bytes of the guest's console output found no reader");
    }
    end
}

/// Takes all of the descriptors that this process may have: each vCPU takes some, and the usual limit
/// is for programs that wait by `select`.
fn open_as_many_files_as_allowed() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::debug!("the limit on open files stays: {error}");
    }
}

/// Confines the calling thread, if that is wanted.
pub(super) fn confined(wanted: bool, thread: Thread) -> io::Result<()> {
    match wanted {
        true => thread.confine().map_err(io::Error::other),
        false => Ok(()),
    }
}

/// What is there before a machine and outlives it.
struct Around<'a> {
    config: &'a VmConfig,
    session: &'a Session,
    opened: &'a Opened,
    signals: &'a Signals,
    api: Option<&'a Api>,
    outlet: &'a ConsoleOutput,
    lives: u32,
}

impl Around<'_> {
    /// Has a signal end the process while this lives, leaving no socket behind.
    fn guard(&self) -> Result<ScopedThread, RunError> {
        let socket = self.api.map(|api| api.file().clone());
        let end = move |signal: &'static str| {
            if let Some(socket) = socket {
                socket.remove();
            }
            eprintln!("granule: ended by {signal} before the guest ran");
            process::exit(0)
        };
        let guard = self.signals.guard(end);
        guard.map_err(doing("waiting for signals"))
    }
}

/// One machine, from its making to its end.
fn live(
    around: &Around<'_>,
    started: Instant,
    report: Option<&mut Report>,
    counters: Option<Counters>,
) -> Result<Ended, RunError> {
    let &Around {
        config,
        session,
        opened,
        signals,
        api,
        outlet,
        lives,
    } = around;
    let event = || EventFd::new(libc::EFD_NONBLOCK).map_err(doing("making an event (eventfd)"));
    let copy = |event: &EventFd| event.try_clone().map_err(doing("copying an event"));
    let (wake, quit) = (event()?, event()?);
    let counted = report.is_some() || api.is_some();
    let counters = counters.unwrap_or_else(|| {
        if counted {
            Counters::open()
        } else {
            Counters::none()
        }
    });
    let tables_before = counted.then(stats::fresh_tables_of_guests).flatten();
    let (marks, marked) = mpsc::channel();
    let confine = session.sandbox;
    let teller = || {
        let (marks, heard) = (marks.clone(), copy(&wake)?);
        Ok::<_, RunError>(move |mark, time| {
            if mark == BootTimer::INIT {
                granule_types::mark::guest_init();
            }
            let _ = marks.send((mark, time));
            let _ = heard.write(1);
        })
    };
    let text = match &session.init_text {
        None => None,
        Some(text) => {
            let tell = teller()?;
            let found = move || tell(BootTimer::INIT, started.elapsed());
            Some((text.as_str(), Box::new(found) as Box<_>))
        }
    };
    let Ways {
        output,
        console,
        keys,
    } = Ways::new(outlet, config.devices.console, text).map_err(doing("making a pipe"))?;
    let guard = around.guard()?;
    let mut machine = linux::build(
        config,
        opened,
        Ends {
            output,
            outlet: outlet.clone(),
            console,
            tell: Box::new(teller()?),
            started,
            ended: copy(&wake)?,
            prepare: Arc::new(move || confined(confine, Thread::Vcpu)),
            statistics: counted,
        },
    )?;
    drop(guard);
    let terminal = Terminal::raw().map_err(doing("making the terminal raw"))?;
    let feed = console_io::listen(
        keys,
        &machine.serial,
        terminal.as_ref(),
        copy(&quit)?,
        confine,
    )
    .map_err(doing("reading the console's input"))?;
    let meter = Meter::new(
        counters,
        mem::replace(
            &mut machine.statistics,
            crate::kvm::stats::Statistics::none(),
        ),
        Arc::clone(machine.crew.exits()),
        machine.memory.zones.clone(),
        tables_before,
    );
    let mut controls = Controls::new(config, &machine, meter, lives);
    granule_types::mark::guest();
    if counted {
        controls.end_phase("boot", started.elapsed());
    }
    machine.crew.want(Wanted::Run);
    let waiting = Waiting {
        signals,
        wake: &wake,
        quit: &quit,
        marked: &marked,
        started,
        counted,
        terminal: terminal.as_ref(),
        api,
    };
    let end = waiting
        .wait(&mut controls)
        .map_err(doing("waiting for the guest"))?;
    if counted {
        controls.end_phase("end", started.elapsed());
    }
    for ram in &machine.memory.zones {
        if let Err(error) = ram.obtained() {
            log::warn!("guest memory: {error}");
        }
    }
    if let Some(report) = report
        && let Err(error) = report.write(config, end.name(), &controls.life)
    {
        if end != Ended::Reset || !session.reboot {
            return Err(file("--stats", &report.path)(error));
        }
        // The guest is worth more than figures about it.
        let path = report.path.display();
        log::error!("the statistics of a life are lost: --stats {path}: {error}");
    }
    drop(controls);
    drop(feed);
    drop(machine);
    drop(terminal);
    Ok(end)
}

/// What the main thread waits for.
struct Waiting<'a> {
    signals: &'a Signals,
    wake: &'a EventFd,
    quit: &'a EventFd,
    marked: &'a mpsc::Receiver<(u8, Duration)>,
    started: Instant,
    counted: bool,
    terminal: Option<&'a Terminal>,
    api: Option<&'a Api>,
}

impl Waiting<'_> {
    /// Waits until the machine has ended or is asked to.
    fn wait(&self, controls: &mut Controls<'_>) -> io::Result<Ended> {
        loop {
            let quit = self.sleep(controls)?;
            for (mark, at) in self.marked.try_iter() {
                log::info!("the guest says {mark} after {} ms", at.as_millis());
                controls.life.mark(mark, at);
                if self.counted && mark == BootTimer::INIT && controls.life.phase() == "boot" {
                    controls.end_phase("first-minute", at);
                }
            }
            if self.counted && self.minute_left(controls) == Some(Duration::ZERO) {
                controls.end_phase("run", self.started.elapsed());
            }
            while let Some(asked) = self.api.and_then(Api::next) {
                let answer = controls.handle(asked.request);
                asked.answer(answer);
            }
            if let Some(end) = controls.machine.crew.end() {
                return Ok(match end {
                    End::Off => Ended::Off,
                    End::Reset => Ended::Reset,
                    End::Crash => Ended::Failed("the guest says that it crashed".to_owned()),
                    End::Stuck(why) => Ended::Failed(why),
                });
            }
            if quit {
                return Ok(Ended::Stopped("the escape key"));
            }
            if controls.stopped {
                return Ok(Ended::Stopped("the control socket"));
            }
            match self.signals.next() {
                Some(Asked::End(signal)) => return Ok(Ended::Stopped(signal)),
                Some(Asked::Continue) => {
                    if let Some(terminal) = self.terminal {
                        terminal.again()?;
                    }
                }
                None => {}
            }
        }
    }

    /// Sleeps until there is something to do; whether the escape key was typed.
    fn sleep(&self, controls: &Controls<'_>) -> io::Result<bool> {
        let watch = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![
            watch(borrow_event(self.quit)),
            watch(borrow_event(self.wake)),
            watch(self.signals.as_fd()),
        ];
        fds.extend(self.api.map(|api| watch(borrow_event(api.event()))));
        let timeout = self.minute_left(controls).map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [quit, woken] = [0, 1].map(|at: usize| !fds[at].revents().is_empty());
        if woken {
            // What it told of is looked at behind this; what comes now tells again.
            let _ = self.wake.read();
        }
        Ok(quit)
    }

    /// What is left of the guest's first minute, while that is the phase.
    fn minute_left(&self, controls: &Controls<'_>) -> Option<Duration> {
        let life = &controls.life;
        let end = life.since() + FIRST_MINUTE;
        (life.phase() == "first-minute").then(|| end.saturating_sub(self.started.elapsed()))
    }
}
