// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Destinations of console input: the FIFO of a serial port, and a pipe to a virtio console.

use std::{io, sync::Arc};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
};
use vmm_sys_util::eventfd::EventFd;

use crate::{devices::serial::SerialPort, scoped_thread::borrow_event};

/// Destination of console input.
pub trait InputSink: Send + 'static {
    /// Takes as much of `input` as there is space for and returns how much that was.
    ///
    /// # Errors
    /// The sink takes no further input.
    fn take(&mut self, input: &[u8]) -> io::Result<usize>;

    /// Returns the descriptor that signals space after a short [`InputSink::take`].
    fn space_event(&self) -> PollFd<'_>;
}

/// Input sink that fills the FIFO of a serial port.
#[derive(Debug)]
pub struct SerialSink<P: ?Sized> {
    drained: Arc<EventFd>,
    port: Arc<Mutex<P>>,
}

impl<P: SerialPort + ?Sized> SerialSink<P> {
    /// Creates a sink for this port.
    ///
    /// # Errors
    /// The host is out of file descriptors.
    pub fn new(port: Arc<Mutex<P>>) -> io::Result<Self> {
        let drained = Arc::new(EventFd::new(libc::EFD_NONBLOCK)?);
        Ok(Self { drained, port })
    }
}

impl<P: SerialPort + ?Sized + 'static> InputSink for SerialSink<P> {
    fn take(&mut self, input: &[u8]) -> io::Result<usize> {
        // Fails if the event is not signalled.
        let _ = self.drained.read();
        let mut port = self.port.lock();
        let taken = port.receive(input);
        if taken < input.len() {
            port.drained().arm(&self.drained);
        }
        Ok(taken)
    }

    fn space_event(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(borrow_event(&self.drained), PollFlags::IN)
    }
}

/// Input sink that writes to a pipe from which a device reads.
#[derive(Debug)]
pub struct PipeSink(io::PipeWriter);

impl PipeSink {
    /// Creates a pipe and returns the sink and the end that the device reads.
    ///
    /// # Errors
    /// The host is out of file descriptors.
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

    fn space_event(&self) -> PollFd<'_> {
        PollFd::new(&self.0, PollFlags::OUT)
    }
}
