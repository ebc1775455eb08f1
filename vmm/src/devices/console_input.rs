// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Carries what is typed to the guest's console, in a thread of its own.
//!
//! What was read goes through a filter first, which is where an escape key is found, and then waits
//! until the guest takes it. At a terminal reading goes on meanwhile, or a guest that takes nothing
//! would keep the escape key from being seen; what is beyond a bound is dropped. From a file or a
//! pipe nothing is dropped: it is not read before the guest has taken what was read.

use std::{io, os::fd::AsFd, sync::Arc};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use vmm_sys_util::eventfd::EventFd;

use super::serial::SerialPort;
use crate::scoped_thread::{ScopedThread, borrow_event};

/// Bytes that wait for the guest.
const BOUND: usize = 64 << 10;

/// What takes input for the guest.
pub trait InputSink: Send + 'static {
    /// Takes as much of `input` as there is room for now, and says how much that was.
    ///
    /// # Errors
    /// It never takes anything again.
    fn take(&mut self, input: &[u8]) -> io::Result<usize>;

    /// What to wait for when it did not take everything.
    fn room(&self) -> PollFd<'_>;
}

/// A serial port as a taker.
#[derive(Debug)]
pub struct SerialSink<P: ?Sized> {
    drained: Arc<EventFd>,
    port: Arc<Mutex<P>>,
}

impl<P: SerialPort + ?Sized> SerialSink<P> {
    /// Gives input to this port.
    ///
    /// # Errors
    /// No event file descriptor can be had.
    pub fn new(port: Arc<Mutex<P>>) -> io::Result<Self> {
        let drained = Arc::new(EventFd::new(libc::EFD_NONBLOCK)?);
        Ok(Self { drained, port })
    }
}

impl<P: SerialPort + ?Sized + 'static> InputSink for SerialSink<P> {
    fn take(&mut self, input: &[u8]) -> io::Result<usize> {
        // Empty unless it has just been told of.
        let _ = self.drained.read();
        let mut port = self.port.lock();
        let taken = port.receive(input);
        if taken < input.len() {
            port.drained().wake(&self.drained);
        }
        Ok(taken)
    }

    fn room(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(borrow_event(&self.drained), PollFlags::IN)
    }
}

/// A pipe as a taker, whose other end a device reads.
#[derive(Debug)]
pub struct PipeSink(io::PipeWriter);

impl PipeSink {
    /// A pipe, and the end to be read.
    ///
    /// # Errors
    /// None can be had.
    pub fn new() -> io::Result<(Self, io::PipeReader)> {
        let (reader, writer) = io::pipe()?;
        rustix::io::ioctl_fionbio(&writer, true)?;
        Ok((Self(writer), reader))
    }
}

impl InputSink for PipeSink {
    fn take(&mut self, input: &[u8]) -> io::Result<usize> {
        match rustix::io::write(&self.0, input) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            other => Ok(other?),
        }
    }

    fn room(&self) -> PollFd<'_> {
        PollFd::new(&self.0, PollFlags::OUT)
    }
}

/// What becomes of input that the guest does not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    /// It is read and dropped: a terminal's.
    Drop,
    /// It is not read: a file's or a pipe's.
    Wait,
}

/// Reads `input` until its end and gives the guest what `filter` lets through of it. The filter may
/// change the bytes in place or take some out. It returns `false` when input is to end. Dropping what is
/// given ends the thread.
///
/// # Errors
/// No event file descriptor or no thread can be had.
pub fn forward_input(
    to: impl InputSink,
    input: impl AsFd + Send + 'static,
    excess: Overflow,
    mut filter: impl FnMut(&mut Vec<u8>) -> bool + Send + 'static,
) -> io::Result<ScopedThread> {
    ScopedThread::start("console-in", move |stop| {
        if let Err(error) = carry(to, &input, excess, &mut filter, stop) {
            log::warn!("the guest gets no more console input: {error}");
        }
    })
}

fn carry(
    mut to: impl InputSink,
    input: &impl AsFd,
    excess: Overflow,
    filter: &mut impl FnMut(&mut Vec<u8>) -> bool,
    stop: &EventFd,
) -> io::Result<()> {
    let (mut backlog, mut bytes) = (Vec::new(), Vec::new());
    let (mut goes_on, mut told) = (true, false);
    while goes_on || !backlog.is_empty() {
        let reads = goes_on && (excess == Overflow::Drop || backlog.is_empty());
        let mut fds = vec![PollFd::from_borrowed_fd(borrow_event(stop), PollFlags::IN)];
        fds.extend((!backlog.is_empty()).then(|| to.room()));
        fds.extend(reads.then(|| PollFd::new(input, PollFlags::IN)));
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        let ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        if ready(fds.first()) {
            return Ok(());
        }
        if reads && ready(fds.last()) {
            goes_on = read(input, &mut bytes)? && filter(&mut bytes);
            let room = BOUND - backlog.len();
            if bytes.len() > room {
                bytes.truncate(room);
                if !std::mem::replace(&mut told, true) {
                    log::warn!(
                        "the guest does not read its console: what is typed beyond {BOUND} bytes \
                         is dropped"
                    );
                }
            }
            backlog.append(&mut bytes);
        }
        if !backlog.is_empty() {
            let taken = to.take(&backlog)?;
            backlog.drain(..taken);
        }
    }
    Ok(())
}

/// Reads what is there; false at its end.
fn read(input: &impl AsFd, bytes: &mut Vec<u8>) -> io::Result<bool> {
    let mut buffer = [0; 1024];
    match rustix::io::read(input, &mut buffer) {
        Err(Errno::INTR | Errno::AGAIN) => Ok(true),
        Err(error) => Err(error.into()),
        Ok(count) => {
            bytes.extend_from_slice(&buffer[..count]);
            Ok(count > 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        sync::mpsc,
        thread,
        time::Duration,
    };

    use super::{
        super::{MmioDevice as _, Serial, testing::Page},
        *,
    };

    fn port() -> (Arc<Mutex<Serial>>, EventFd) {
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let port = Serial::new(irq.try_clone().unwrap(), Box::new(Page::default()));
        (Arc::new(Mutex::new(port)), irq)
    }

    /// Reads so many bytes from the port as a guest does.
    fn guest_reads(port: &Mutex<Serial>, count: usize) -> Vec<u8> {
        let mut got = Vec::new();
        while got.len() < count {
            let mut port = port.lock();
            let mut data = [0];
            port.read(5, &mut data);
            if data[0] & 1 == 1 {
                port.read(0, &mut data);
                got.push(data[0]);
            }
        }
        got
    }

    #[test]
    fn more_input_than_the_fifo_holds_arrives_in_order_though_it_has_ended() {
        for excess in [Overflow::Drop, Overflow::Wait] {
            let (port, irq) = port();
            let (input, mut keyboard) = io::pipe().unwrap();
            let typed: Vec<u8> = (0..200).collect();
            port.lock().write(1, &[1]);
            let to = SerialSink::new(Arc::clone(&port)).unwrap();
            let feed = forward_input(to, input, excess, |bytes| {
                bytes.retain(|byte| *byte != 100);
                true
            });

            keyboard.write_all(&typed).unwrap();
            drop(keyboard);
            let got = guest_reads(&port, 199);

            assert!(got.iter().copied().eq((0..200).filter(|byte| *byte != 100)));
            assert!(irq.read().unwrap() > 0);
            drop(feed.unwrap());
        }
    }

    #[test]
    fn a_file_of_any_length_waits_for_the_guest() {
        let (port, _irq) = port();
        let (input, mut keyboard) = io::pipe().unwrap();
        let to = SerialSink::new(Arc::clone(&port)).unwrap();
        let _feed = forward_input(to, input, Overflow::Wait, |_| true).unwrap();
        let long: Vec<u8> = (0..251).cycle().take(3 * BOUND).collect();
        let written = long.clone();
        let writer = thread::spawn(move || keyboard.write_all(&written).unwrap());

        let got = guest_reads(&port, long.len());

        writer.join().unwrap();
        assert!(got == long);
    }

    #[test]
    fn the_filter_sees_what_is_typed_though_the_guest_reads_nothing() {
        let (port, _irq) = port();
        let (input, mut keyboard) = io::pipe().unwrap();
        let (sender, seen) = mpsc::channel();
        let to = SerialSink::new(port).unwrap();
        let feed = forward_input(to, input, Overflow::Drop, move |bytes| {
            let ends = bytes.contains(&1);
            sender.send(ends).unwrap();
            !ends
        });

        keyboard.write_all(&vec![7; 3 * BOUND]).unwrap();
        keyboard.write_all(&[1]).unwrap();

        while !seen.recv_timeout(Duration::from_secs(10)).unwrap() {}
        // And ends, though it still has what the guest did not read.
        drop(feed.unwrap());
    }

    #[test]
    fn feeding_ends_when_dropped_though_the_guest_reads_nothing() {
        let (port, _irq) = port();
        let (input, mut keyboard) = io::pipe().unwrap();
        let to = SerialSink::new(port).unwrap();
        let feed = forward_input(to, input, Overflow::Wait, |_| true).unwrap();
        keyboard.write_all(&[7; 500]).unwrap();

        drop(feed);

        assert!(keyboard.write_all(&[7]).is_err());
    }

    #[test]
    fn a_pipe_takes_input_and_is_closed_at_its_end() {
        let (to, mut device) = PipeSink::new().unwrap();
        let (input, mut keyboard) = io::pipe().unwrap();
        let _feed = forward_input(to, input, Overflow::Wait, |_| true).unwrap();
        let long: Vec<u8> = (0..251).cycle().take(3 * BOUND).collect();
        let written = long.clone();
        thread::spawn(move || keyboard.write_all(&written).unwrap());

        let mut got = Vec::new();
        device.read_to_end(&mut got).unwrap();

        assert!(got == long);
    }
}
