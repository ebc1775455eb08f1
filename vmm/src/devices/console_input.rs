// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Console input: a thread that forwards bytes from a file descriptor to the guest's console.
//!
//! Input passes a filter, which detects the escape key, and is buffered until the guest reads it.
//! With a terminal, the thread keeps reading even if the guest does not, so that the escape key
//! always works; bytes beyond a limit are dropped. With a file or a pipe, the thread reads again
//! only after the sink has accepted all earlier bytes, so that no byte is lost.
//!
//! The bytes go to the FIFO of a serial port ([`SerialSink`]) or to a pipe from which a virtio
//! console reads ([`PipeSink`]).

use std::{io, os::fd::AsFd, sync::Arc};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use vmm_sys_util::eventfd::EventFd;

use super::serial::SerialPort;
use crate::scoped_thread::{ScopedThread, borrow_event};

/// Maximum number of bytes buffered for the guest.
const BACKLOG_CAPACITY: usize = 64 << 10;

/// Policy for input that the guest does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverflowPolicy {
    /// Drops further input: for a terminal.
    Drop,
    /// Stops reading: for a file or a pipe.
    Wait,
}

/// Destination of console input.
pub trait InputSink: Send + 'static {
    /// Accepts as many bytes of `input` as fit, and returns their number.
    ///
    /// # Errors
    /// The sink is closed.
    fn accept(&mut self, input: &[u8]) -> io::Result<usize>;

    /// Returns the descriptor that signals space after a short [`InputSink::accept`].
    fn space_event(&self) -> PollFd<'_>;
}

/// Input sink that fills the FIFO of a serial port.
#[allow(missing_debug_implementations, reason = "it holds any port")]
pub struct SerialSink {
    drain_event: Arc<EventFd>,
    port: Arc<Mutex<dyn SerialPort>>,
}

impl SerialSink {
    /// Creates a sink for this port.
    pub fn new(port: Arc<Mutex<dyn SerialPort>>) -> Self {
        let drain_event = port.lock().drain_event();
        Self { drain_event, port }
    }
}

impl InputSink for SerialSink {
    fn accept(&mut self, input: &[u8]) -> io::Result<usize> {
        // A cleared event reports the next drain of the FIFO; the read fails if it is clear.
        let _ = self.drain_event.read();
        Ok(self.port.lock().receive(input))
    }

    fn space_event(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(borrow_event(&self.drain_event), PollFlags::IN)
    }
}

/// Input sink that writes to a pipe from which a device reads.
#[derive(Debug)]
pub struct PipeSink(io::PipeWriter);

impl PipeSink {
    /// Creates a pipe; returns the sink and the read end for the device.
    pub fn new() -> io::Result<(Self, io::PipeReader)> {
        let (reader, writer) = io::pipe()?;
        rustix::io::ioctl_fionbio(&writer, true)?;
        Ok((Self(writer), reader))
    }
}

impl InputSink for PipeSink {
    fn accept(&mut self, input: &[u8]) -> io::Result<usize> {
        match rustix::io::write(&self.0, input) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            other => Ok(other?),
        }
    }

    fn space_event(&self) -> PollFd<'_> {
        PollFd::new(&self.0, PollFlags::OUT)
    }
}

/// Starts a thread that reads `input` to its end and forwards it through `filter`. The filter may
/// change and remove bytes, and returns `false` to end the input. Dropping the handle ends the
/// thread.
pub fn forward_input(
    sink: impl InputSink,
    input: impl AsFd + Send + 'static,
    overflow: OverflowPolicy,
    mut filter: impl FnMut(&mut Vec<u8>) -> bool + Send + 'static,
) -> io::Result<ScopedThread> {
    ScopedThread::start("console-in", move |stop| {
        if let Err(error) = forward(sink, &input, overflow, &mut filter, stop) {
            log::warn!("console input ends: {error}");
        }
    })
}

fn forward(
    mut sink: impl InputSink,
    input: &impl AsFd,
    overflow: OverflowPolicy,
    filter: &mut impl FnMut(&mut Vec<u8>) -> bool,
    stop: &EventFd,
) -> io::Result<()> {
    let (mut backlog, mut bytes) = (Vec::new(), Vec::new());
    let (mut open, mut warned) = (true, false);
    while open || !backlog.is_empty() {
        let reads = open && (overflow == OverflowPolicy::Drop || backlog.is_empty());
        let mut fds = vec![PollFd::from_borrowed_fd(borrow_event(stop), PollFlags::IN)];
        fds.extend((!backlog.is_empty()).then(|| sink.space_event()));
        fds.extend(reads.then(|| PollFd::new(input, PollFlags::IN)));
        rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
        let ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        if ready(fds.first()) {
            return Ok(());
        }
        if reads && ready(fds.last()) {
            open = read_chunk(input, &mut bytes)? && filter(&mut bytes);
            let space = BACKLOG_CAPACITY - backlog.len();
            if bytes.len() > space {
                bytes.truncate(space);
                if !std::mem::replace(&mut warned, true) {
                    log::warn!(
                        "the guest does not read its console: input beyond {BACKLOG_CAPACITY} \
                         bytes is dropped"
                    );
                }
            }
            backlog.append(&mut bytes);
        }
        if !backlog.is_empty() {
            let accepted = sink.accept(&backlog)?;
            backlog.drain(..accepted);
        }
    }
    Ok(())
}

/// Appends the available bytes to `bytes`. Returns false at the end of the input.
fn read_chunk(input: &impl AsFd, bytes: &mut Vec<u8>) -> io::Result<bool> {
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
        super::{MmioDevice as _, Serial},
        *,
    };

    /// Returns a serial port with its interrupt, its sink, and an input pipe.
    fn setup() -> ((Arc<Mutex<Serial>>, EventFd), SerialSink, io::PipeReader, io::PipeWriter) {
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let port = Serial::new(irq.try_clone().unwrap(), Box::new(io::sink())).unwrap();
        let port = Arc::new(Mutex::new(port));
        let sink = SerialSink::new(Arc::clone(&port) as _);
        let (input, keyboard) = io::pipe().unwrap();
        ((port, irq), sink, input, keyboard)
    }

    /// Reads `count` bytes from the port as a guest driver does.
    fn read_port(port: &Mutex<Serial>, count: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < count {
            let mut port = port.lock();
            let mut data = [0];
            assert!(port.read(5, &mut data));
            if data[0] & 1 == 1 {
                assert!(port.read(0, &mut data));
                bytes.push(data[0]);
            } else {
                drop(port);
                thread::yield_now();
            }
        }
        bytes
    }

    fn long_input() -> Vec<u8> {
        (0..251).cycle().take(3 * BACKLOG_CAPACITY).collect()
    }

    #[test]
    fn input_larger_than_the_fifo_arrives_in_order() {
        for overflow in [OverflowPolicy::Drop, OverflowPolicy::Wait] {
            let ((port, irq), sink, input, mut keyboard) = setup();
            assert!(port.lock().write(1, &[1]));
            let thread = forward_input(sink, input, overflow, |bytes| {
                bytes.retain(|byte| *byte != 100);
                true
            });

            let typed: Vec<u8> = (0..200).collect();
            keyboard.write_all(&typed).unwrap();
            drop(keyboard);
            let received = read_port(&port, 199);

            assert!(received.into_iter().eq((0..200).filter(|byte| *byte != 100)));
            assert!(irq.read().unwrap() > 0);
            drop(thread.unwrap());
        }
    }

    #[test]
    fn no_byte_of_a_long_file_is_lost() {
        let ((port, _irq), sink, input, mut keyboard) = setup();
        let _thread = forward_input(sink, input, OverflowPolicy::Wait, |_| true).unwrap();
        let writer = thread::spawn(move || keyboard.write_all(&long_input()).unwrap());

        let received = read_port(&port, long_input().len());

        writer.join().unwrap();
        assert!(received == long_input());
    }

    #[test]
    fn the_filter_receives_input_that_the_guest_does_not_read() {
        let (_port, sink, input, mut keyboard) = setup();
        let (sender, found) = mpsc::channel();
        let thread = forward_input(sink, input, OverflowPolicy::Drop, move |bytes| {
            let is_end = bytes.contains(&1);
            sender.send(is_end).unwrap();
            !is_end
        });

        keyboard.write_all(&vec![7; 3 * BACKLOG_CAPACITY]).unwrap();
        keyboard.write_all(&[1]).unwrap();

        while !found.recv_timeout(Duration::from_secs(10)).unwrap() {}
        // The thread ends although the guest has not read all bytes.
        drop(thread.unwrap());
    }

    #[test]
    fn dropping_the_handle_ends_a_thread_that_waits_for_the_guest() {
        let (_port, sink, input, mut keyboard) = setup();
        let thread = forward_input(sink, input, OverflowPolicy::Wait, |_| true).unwrap();
        keyboard.write_all(&[7; 500]).unwrap();

        drop(thread);

        assert!(keyboard.write_all(&[7]).is_err());
    }

    #[test]
    fn a_pipe_sink_forwards_all_bytes_and_closes_at_the_end() {
        let (sink, mut device) = PipeSink::new().unwrap();
        let (input, mut keyboard) = io::pipe().unwrap();
        let _thread = forward_input(sink, input, OverflowPolicy::Wait, |_| true).unwrap();
        thread::spawn(move || keyboard.write_all(&long_input()).unwrap());

        let mut received = Vec::new();
        device.read_to_end(&mut received).unwrap();

        assert!(received == long_input());
    }
}
