"""An owned workstation: 4x RTX PRO 6000, systemd, root or sudo.

Copy this file, put your host in, then: rackwright preflight MYFILE.py
"""

hosts = [
    (
        "workstation",
        {
            "ssh_hostname": "192.0.2.10",
            "ssh_user": "root",  # or a user with passwordless sudo, together with: "_sudo": True
            "recipe": "deepseek-v4-flash-sm120",
            "root": "/opt/rackwright",
            "model_root": "/data/models",
        },
    ),
]
