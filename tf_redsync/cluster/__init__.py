"""The worker processes of a job: membership, agreement, and failure detection.

The modules cover TF_CONFIG, the rendezvous before TensorFlow starts, the agreement on
configurations, the watchdog with its stall detector, the step barrier and the errors of a step.
They do not exchange gradients.
"""
