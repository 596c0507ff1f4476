"""This machine, without SSH: the way to work on the GPU host itself (`rackwright site local`)."""

hosts = [
    (
        "@local",
        {
            "recipe": "deepseek-v4-flash-sm120",
            "root": "/opt/rackwright",
        },
    ),
]
