// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The event loop of the main thread while a guest runs.

use std::{
    io,
    os::fd::AsFd as _,
    sync::mpsc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    time::Timespec,
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    api::Api,
    boot_stats::FIRST_MINUTE,
    control::VmController,
    outcome::VmOutcome,
    signals::{SignalRequest, Signals},
    terminal::Terminal,
};
use crate::{devices::BootTimer, scoped_thread::borrow_event};

/// The event sources of the main thread.
pub(super) struct EventLoop<'a> {
    pub(super) signals: &'a Signals,
    /// Signalled for boot timer marks and for the guest's exit.
    pub(super) wake: &'a EventFd,
    /// Signalled by the escape key.
    pub(super) quit: &'a EventFd,
    pub(super) marks: &'a mpsc::Receiver<(u8, Duration)>,
    pub(super) started: Instant,
    pub(super) terminal: Option<&'a Terminal>,
    pub(super) api: Option<&'a Api>,
}

impl EventLoop<'_> {
    /// Handles events until the guest exits or the VM is stopped.
    pub(super) fn run(&self, controller: &mut VmController<'_>) -> io::Result<VmOutcome> {
        loop {
            let quit = self.wait(controller)?;
            for (mark, at) in self.marks.try_iter() {
                log::info!("boot timer mark {mark} after {} ms", at.as_millis());
                controller.boot.mark(mark, at);
                if mark == BootTimer::INIT && controller.boot.phase == "boot" {
                    controller.end_phase("first-minute", at);
                }
            }
            if self.rest_of_first_minute(controller) == Some(Duration::ZERO) {
                controller.end_phase("run", self.started.elapsed());
            }
            while let Some(pending) = self.api.and_then(Api::next) {
                let response = controller.handle(pending.request);
                pending.respond(response);
            }
            if let Some(exit) = controller.vm.vcpus.guest_exit() {
                return Ok(exit);
            }
            if quit {
                return Ok(VmOutcome::Stopped("the escape key"));
            }
            if controller.stop_requested {
                return Ok(VmOutcome::Stopped("the control socket"));
            }
            match self.signals.next() {
                Some(SignalRequest::Terminate(signal)) => return Ok(VmOutcome::Stopped(signal)),
                Some(SignalRequest::Continue) => {
                    if let Some(terminal) = self.terminal {
                        terminal.set_raw()?;
                    }
                }
                None => {}
            }
        }
    }

    /// Waits for an event; returns whether the escape key was typed.
    fn wait(&self, controller: &VmController<'_>) -> io::Result<bool> {
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![
            readable(borrow_event(self.quit)),
            readable(borrow_event(self.wake)),
            readable(self.signals.as_fd()),
        ];
        fds.extend(self.api.map(|api| readable(borrow_event(&api.event))));
        let timeout = self.rest_of_first_minute(controller).map(|rest| Timespec {
            tv_sec: i64::try_from(rest.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: rest.subsec_nanos().into(),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [quit, woken] = [0, 1].map(|index: usize| !fds[index].revents().is_empty());
        if woken {
            // The sources are checked after this read; later events signal again.
            let _ = self.wake.read();
        }
        Ok(quit)
    }

    /// Returns the time left in phase `first-minute`, or `None` in another phase.
    fn rest_of_first_minute(&self, controller: &VmController<'_>) -> Option<Duration> {
        let boot = &controller.boot;
        let end = boot.since + FIRST_MINUTE;
        (boot.phase == "first-minute").then(|| end.saturating_sub(self.started.elapsed()))
    }
}
